"""Tools that a model calls while it generates, and the environments that answer."""

from covey.environments.agent import Agent, AgentResult, agent_reward
from covey.environments.episodes import EpisodeLimits, Episodes, EpisodeSampler
from covey.environments.factory import EnvironmentPool
from covey.environments.gymnasium import gymnasium_environment
from covey.environments.harbor import HarborBashEnv, HarborEnv, HarborSpec, harbor_environment
from covey.environments.mcp import mcp_tools
from covey.environments.openenv import openenv_environment
from covey.environments.rollout_func import RolloutFuncSampler
from covey.environments.stepping import Stepped, SteppedEnvironment
from covey.environments.template import Template
from covey.environments.tools import Tool, tool, tools_of
from covey.environments.verifiers import verifiers_agent

__all__ = [
    "Agent", "AgentResult", "EnvironmentPool", "EpisodeLimits", "EpisodeSampler", "Episodes",
    "HarborBashEnv", "HarborEnv", "HarborSpec", "RolloutFuncSampler", "Stepped", "SteppedEnvironment", "Template",
    "Tool", "agent_reward", "gymnasium_environment", "harbor_environment", "mcp_tools", "openenv_environment", "tool", "tools_of", "verifiers_agent",
]  # fmt: skip
