"""Chat templates of today's families, by shape and in our own words."""

from environments.acting import HARMONY

LAST = "{% set n = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
THOUGHT = "{% if m.reasoning_content and loop.index0 > n.last %}{{ m.reasoning_content }}{% endif %}"
PAIRS = "{% for k, v in c.function.arguments.items() %}"
TEXT = "{{ v if v is string else v | tojson }}"

KIMI = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|im_system|>{{ m.name }}<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GLM = (
    LAST + "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n<think>" + THOUGHT + "</think>"
    "{% if m.content %}\n{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n" + PAIRS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # fmt: skip
QWEN = (
    LAST + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > n.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n\n<tool_call>\n<function={{ c.function.name }}>\n" + PAIRS
    + "<parameter={{ k }}>\n" + TEXT + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)  # fmt: skip
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% else %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}<|Assistant|></think>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% if loop.first %}<|calls|>{% endif %}<|call|>{{ c.function.name }}<|sep|>"
    "{{ c.function.arguments }}<|callend|>{% endfor %}<|end|>{% else %}<|outputs|>{{ m.content }}<|outputsend|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|></think>{% endif %}"
)
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|bot|>{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}<|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
"""A conversation whose calls are written as CALLS."""
EACH = "{% for c in m.tool_calls %}"
KEYED = (
    "{% for k, v in c.function.arguments.items() %}{{ k }}SEP"
    "{% if v is string %}QUOTE{{ v }}QUOTE{% else %}{{ v | tojson }}{% endif %}{% if not loop.last %}, {% endif %}{% endfor %}"
)
keyed = lambda separator, quote: KEYED.replace("SEP", separator).replace("QUOTE", quote)
GEMMA = CHAT.replace(
    "CALLS",
    EACH
    + "<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    + keyed(":", '<|"|>')
    + "{{ '}' }}<tool_call|>{% endfor %}",
)
PYTHON = (
    "{% for c in m.tool_calls %}{{ c.function.name }}("
    + keyed("=", "'")
    + "){% if not loop.last %}AND{% endif %}{% endfor %}"
)
LFM = CHAT.replace("CALLS", "<|tool_call_start|>[" + PYTHON.replace("AND", ", ") + "]<|tool_call_end|>")
LLAMA4 = CHAT.replace("CALLS", "[" + PYTHON.replace("AND", ", ").replace("'", '"') + "]")
OLMO = CHAT.replace("CALLS", "<function_calls>\n" + PYTHON.replace("AND", "\n") + "\n</function_calls>")
COHERE = CHAT.replace(
    "CALLS",
    "<|START_ACTION|>[\n{% for c in m.tool_calls %}"
    '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %},{% endif %}\n{% endfor %}]<|END_ACTION|>",
)
COMMAND_R = CHAT.replace(
    "CALLS",
    "Action: ```json\n[{% for c in m.tool_calls %}"
    '\n    {\n        "tool_name": "{{ c.function.name }}",\n        "parameters": {{ c.function.arguments | tojson }}\n    }'
    "{% if not loop.last %},{% endif %}{% endfor %}\n]```",
)
INVOKE = (
    '<invoke name="{{ c.function.name }}">\n'
    + PAIRS
    + '<parameter name="{{ k }}">'
    + TEXT
    + "</parameter>\n{% endfor %}</invoke>\n"
)
MINIMAX = CHAT.replace("CALLS", "\n<minimax:tool_call>\n" + EACH + INVOKE + "{% endfor %}</minimax:tool_call>")
DSML = CHAT.replace(
    "CALLS",
    "\n\n<｜DSML｜function_calls>\n" + EACH + '<｜DSML｜invoke name="{{ c.function.name }}">\n' + PAIRS
    + '<｜DSML｜parameter name="{{ k }}" string="{{ \'true\' if v is string else \'false\' }}">' + TEXT
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>",
)  # fmt: skip
KIMI3 = CHAT.replace(
    "CALLS",
    "<|open|>tools<|sep|>" + EACH + '<|open|>call tool="{{ c.function.name }}" index="{{ loop.index }}"<|sep|>' + PAIRS
    + '<|open|>argument key="{{ k }}" type="{{ \'string\' if v is string else \'number\' }}"<|sep|>' + TEXT
    + "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>",
)  # fmt: skip
GRANITE = CHAT.replace(
    "CALLS",
    EACH
    + '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
)
MINIMAX1 = CHAT.replace(
    "CALLS",
    "\n<tool_calls>\n"
    + EACH
    + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n{% endfor %}</tool_calls>',
)
MUSE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}{% if m.reasoning_content %} to=self<|message|>"
    "{{ m.reasoning_content }}<|eom|><|start|>assistant{% endif %}{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}"
    "<|message|>{{ m.content or '' }}<calls>\n" + EACH + INVOKE + "{% endfor %}</calls>{% else %} to=user<|message|>{{ m.content }}"
    "{% endif %}{% else %}<|message|>{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)  # fmt: skip
UNMARKED = CHAT.replace("{{ m.content or '' }}", "{% if m.content %}>>>all\n{{ m.content }}{% endif %}").replace(
    "CALLS", EACH + ">>>{{ c.function.name }}\n{{ '' + c.function.arguments }}{% endfor %}"
)
"""Functionary's, whose prompts end with the mark of a recipient; here without it."""
FUNCTIONARY = UNMARKED.replace("<|bot|>{% endif %}", "<|bot|>>>>{% endif %}")
FAMILIES = {
    "Gemma 4": (GEMMA, ("<|end|>",), None),
    "LFM 2.5": (LFM, ("<|end|>",), None),
    "Llama 4": (LLAMA4, ("<|end|>",), None),
    "OLMo 3": (OLMO, ("<|end|>",), None),
    "Command A": (COHERE, ("<|end|>",), None),
    "Command R+": (COMMAND_R, ("<|end|>",), None),
    "MiniMax M1": (MINIMAX1, ("<|end|>",), None),
    "MiniMax M2": (MINIMAX, ("<|end|>",), None),
    "DeepSeek V3.2": (DSML, ("<|end|>",), None),
    "Kimi K3": (KIMI3, ("<|end|>",), None),
    "Granite 4": (GRANITE, ("<|end|>",), None),
    "gpt-oss": (HARMONY, ("<|call|>", "<|return|>"), None),
    "Kimi K2": (KIMI, ("<|im_end|>",), "functions.add:3"),
    "GLM 4.6": (GLM, ("<|user|>", "<|observation|>"), None),
    "Qwen 3.5": (QWEN, ("<|im_end|>",), None),
    "Mistral": (MISTRAL, ("</s>",), "abcdefghi"),
    "DeepSeek": (DEEPSEEK, ("<|end|>",), None),
    "Functionary 3": (FUNCTIONARY, ("<|end|>",), None),
}
