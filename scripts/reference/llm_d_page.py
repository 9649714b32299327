"""The page on the plugins, sections and parameters of llm-d's ``EndpointPickerConfig``, and their support."""

from __future__ import annotations

from scripts.reference.markdown import code, table

from tercet_gateway.llm_d import PARAMETERS, PASSED_OVER, READ, REFUSED, SECTIONS

HEAD = """# Plugins of llm-d

A scheduling file whose `apiVersion` is llm-d's or the Gateway API Inference Extension's is read unchanged
([how](../howto/llm-d.md)). Each type of plugin has one line here: it is *read* (the line has the differences, if any),
*ignored* (it does not change which engine is picked, or the line says how; the log says so too), or *refused*, since picks
would differ from those that the file asks for.
"""


def llm_d_page() -> str:
    """Return the page."""
    kinds = {
        **{kind: ("read", why or "the same") for kind, why in READ.items()},
        **{kind: ("ignored", why) for kind, why in PASSED_OVER.items()},
        **{kind: ("refused", why) for kind, why in REFUSED.items()},
    }
    parameters = ((f"`{kind}.{name}`", why) for (kind, name), why in sorted(PARAMETERS.items()))
    return "\n\n".join(
        [
            HEAD.strip(),
            table(("type", "", ""), ((code(kind), *kinds[kind]) for kind in sorted(kinds))),
            "## Sections that are ignored\n\n`saturationDetector`, alone or under `flowControl`, is read: its thresholds replace "
            "`--max-waiting-per-engine` and `--max-kv-usage`, or its `concurrency-detector` replaces both.",
            table(("section", ""), ((code(name), why) for name, why in SECTIONS.items())),
            "## Parameters that are ignored",
            table(("parameter", ""), parameters),
        ]
    )
