"""What becomes of each plugin, section and parameter of an ``EndpointPickerConfig`` of llm-d."""

from __future__ import annotations

from scripts.reference.markdown import code, table

from tercet.decisions.scheduling.llm_d_plugins import PARAMETERS, PASSED_OVER, READ, REFUSED, SECTIONS

HEAD = """# Plugins of llm-d

A scheduling file whose `apiVersion` is llm-d's or the Gateway API Inference Extension's is read as it is
([how](../howto/llm-d.md)). Of each type of plugin there is one line here: it is *read* (with what differs, if anything
does), *passed over* (nothing of it changes which engine is picked, or what does is said here; the log says it too), or *refused*,
since picks would not be those that the file asks for.
"""


def llm_d_page() -> str:
    """The page."""
    kinds = {
        **{kind: ("read", why or "the same") for kind, why in READ.items()},
        **{kind: ("passed over", why) for kind, why in PASSED_OVER.items()},
        **{kind: ("refused", why) for kind, why in REFUSED.items()},
    }
    parameters = ((f"`{kind}.{name}`", why) for (kind, name), why in sorted(PARAMETERS.items()))
    return "\n\n".join(
        [
            HEAD.strip(),
            table(("type", "", ""), ((code(kind), *kinds[kind]) for kind in sorted(kinds))),
            "## Sections that are passed over\n\n`saturationDetector`, by itself or under `flowControl`, is read: its thresholds take the "
            "place of `--max-waiting-per-engine` and `--max-kv-usage`, or its `concurrency-detector` of both.",
            table(("section", ""), ((code(name), why) for name, why in SECTIONS.items())),
            "## Parameters that are passed over",
            table(("parameter", ""), parameters),
        ]
    )
