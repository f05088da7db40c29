"""Examples of hypothesis: `make test` tries few, always the same; `make nightly` twenty times as many, by its profile of this name."""

import os

from hypothesis import HealthCheck, settings

TIMES = {"quick": 1, "nightly": 20}
PROFILE = os.environ.get("COVEY_EXAMPLES", "quick")
UNMINDED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]

for name in TIMES:
    settings.register_profile(name, deadline=None, derandomize=True, suppress_health_check=UNMINDED)
settings.load_profile(PROFILE)


def examples(count: int) -> settings:
    """Settings of a test that tries so many examples in `make test`."""
    return settings(max_examples=count * TIMES[PROFILE])
