"""What models say when they call tools, in the words that vLLM's parsers read."""

from __future__ import annotations

import json

CITY = "Z\u00fcrich \U0001f680"
ARGUMENTS = json.dumps({"city": CITY, "days": [1, 2.5, None], "note": 'a "quoted" {brace} \\ end'}, ensure_ascii=False)
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
PARAMETERS = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
HERMES = f"I look. <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
XML = (
    f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n[1, 2]\n"
    "</parameter>\n</function>\n</tool_call>"
)
KEYS = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n</tool_call>"
PYTHON = f'[get_weather(city="{CITY}", days=[1, 2]), get_weather(city="b")]'
INVOKED = f'<invoke name="get_weather"><parameter name="city">{CITY}</parameter></invoke>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
)
BEGIN, END, SEP = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)
CALLS = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
SAMPLES = {
    "deepseek_v3": f"{CALLS[0]}{BEGIN}function{SEP}get_weather\n```json\n{ARGUMENTS}\n```{END}{CALLS[1]}",
    "deepseek_v31": f"So: {CALLS[0]}{BEGIN}get_weather{SEP}{ARGUMENTS}{END}{BEGIN}get_weather{SEP}{{}}{END}{CALLS[1]}",
    "glm45": KEYS, "glm47": KEYS, "hy_v4": f"<tool_calls>{KEYS}</tool_calls>",
    "hy_v3": "<tool_calls><tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>b</arg_value>\n"
    "</tool_call></tool_calls>",
    "granite": f"<|tool_call|>[{CALL}]", "granite-20b-fc": f"<function_call> {CALL}",
    "internlm": f"Yes.<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>",
    "jamba": f"<tool_calls>[{CALL}]</tool_calls>", "kimi_k2": KIMI, "kimi_k3": KIMI,
    "lfm2": f"<|tool_call_start|>{PYTHON}<|tool_call_end|>ok",
    "llama3_json": f"{PARAMETERS}; {PARAMETERS}", "llama4_json": f"<|python_tag|>{PARAMETERS}",
    "llama4_pythonic": PYTHON, "pythonic": PYTHON, "olmo3": f"<function_calls>{PYTHON}</function_calls>",
    "minimax_m2": f"<minimax:tool_call>{INVOKED}</minimax:tool_call>",
    "minimax_m3": f"<minimax:tool_call>{INVOKED}</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
    f" <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "phi4_mini_json": f"functools[{CALL}]", "qwen3_coder": XML, "qwen3_xml": XML,
    "seed_oss": XML.replace("tool_call>", "seed:tool_call>"), "step3p5": XML, "xlam": f"[{CALL}, {CALL}]",
}  # fmt: skip


def said(parser: str) -> str:
    """What a model says for a parser of this name."""
    return f"Let me see: {CITY}. " + SAMPLES.get(parser, HERMES) + " Done."
