"""The looks of the page: one style sheet, light and dark, and the colours that its pictures share."""

from __future__ import annotations

WIDTH = 1072  # of a picture, in the units of its drawing
PATTERNS = """<defs>
<pattern id="reserve" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="2" height="7" fill="var(--soft)"/></pattern>
<pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="2.5" height="6" fill="var(--wait)"/></pattern>
</defs>"""
LIGHT = """
  --paper: #ffffff; --card: #f6f7f9; --ink: #1c2430; --soft: #5b6675; --line: #d9dee5; --accent: #2f5fd0;
  --products: #3f6fd8; --attention: #8b5fd0; --other: #a3adba; --wait: #d8453f;
  --data: #e08a1e; --tensor: #2a9d78; --sequence: #1c9fb8; --pipeline: #d4609c; --several: #8c6d46; --free: #e8ebef;
  --good: #23845d; --bad: #c0362f; --close: #a86a00;
"""
DARK = """
  --paper: #12161c; --card: #1a2029; --ink: #e6eaf0; --soft: #9aa6b5; --line: #303947; --accent: #86aaff;
  --products: #6b93f0; --attention: #aa86ea; --other: #677384; --wait: #f0655e;
  --data: #f0a546; --tensor: #45bf97; --sequence: #4cc0d6; --pipeline: #e884b8; --several: #b3936a; --free: #262e39;
  --good: #4cc493; --bad: #f0655e; --close: #e0a63a;
"""
LOOKS = """
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 21px; margin: 52px 0 4px; padding-top: 20px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 28px 0 6px; }
p { margin: 6px 0 12px; max-width: 78ch; }
.soft, figcaption, .lede { color: var(--soft); }
.lede { margin-bottom: 20px; }
.verdict { background: var(--card); border: 1px solid var(--line); border-left: 5px solid var(--accent);
  border-radius: 8px; padding: 14px 20px; font-size: 17px; margin: 20px 0; }
.verdict p { max-width: none; margin: 4px 0; }
.verdict.good { border-left-color: var(--good); } .verdict.bad { border-left-color: var(--bad); }
.verdict.close { border-left-color: var(--close); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 20px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13.5px; }
.scroll { overflow-x: auto; margin: 10px 0 18px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; min-width: 50%; }
th { text-align: left; color: var(--soft); font-weight: 600; border-bottom: 1.5px solid var(--line); }
th, td { padding: 5px 16px 5px 0; vertical-align: top; }
td { border-bottom: 1px solid var(--line); }
td.name { white-space: nowrap; }
th.right, td.right { text-align: right; white-space: nowrap; }
tr.sum td { font-weight: 600; border-bottom: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; font-size: 14.5px; max-width: 100ch; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); }
figure { margin: 14px 0 22px; }
figcaption { font-size: 14px; max-width: 84ch; margin-top: 6px; }
figure .wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 760px; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
code { font-size: 13.5px; overflow-wrap: anywhere; }
svg text.soft { fill: var(--soft); } svg text.small { font-size: 10.5px; } svg text.on { fill: #fff; }
svg text.middle { text-anchor: middle; } svg text.end { text-anchor: end; }
svg text.edged { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; font-weight: 600; }
svg .frame { stroke: var(--line); } svg .mark { stroke: var(--ink); stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13.5px; color: var(--soft); margin: 8px 0; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 14px; align-items: center;
  font-size: 14px; font-variant-numeric: tabular-nums; margin: 10px 0; }
.bars .track { background: var(--card); border-radius: 4px; height: 18px; overflow: hidden; display: flex; }
.bars .track span { height: 100%; }
.warning { border-left: 4px solid var(--close); background: var(--card); border-radius: 6px; padding: 8px 14px;
  margin: 8px 0; max-width: none; }
details { margin: 10px 0; } summary { cursor: pointer; color: var(--accent); }
footer { margin-top: 60px; color: var(--soft); font-size: 13.5px; }
@media print { main { max-width: none; } .scroll, figure .wide { overflow: visible; } svg { min-width: 0; } }
"""
STYLE = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 32px 24px 80px; }}
{LOOKS}"""
# In a notebook its theme decides, where it says what that is (JupyterLab, nbconvert), else the browser. The class is
# named three times so that the notebook's own rules for tables do not win.
IN_NOTEBOOK = f"""
.sharded-train {{ {LIGHT} }}
@media (prefers-color-scheme: dark) {{ .sharded-train {{ {DARK} }} }}
[data-jp-theme-light="true"] .sharded-train {{ {LIGHT} }}
[data-jp-theme-light="false"] .sharded-train {{ {DARK} }}
.sharded-train.sharded-train.sharded-train {{ background: var(--paper); color: var(--ink); padding: 10px 14px;
  border-radius: 8px; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif;
  & * {{ box-sizing: border-box; }}
  {LOOKS}
  h2 {{ margin-top: 22px; padding-top: 12px; font-size: 19px; }}
  tr, tr:nth-child(odd), tr:nth-child(even) {{ background: none; color: var(--ink); }}
  th, td {{ text-align: left; max-width: none; white-space: normal; }}
  th.right, td.right {{ text-align: right; }}
  svg {{ min-width: 0; }}
}}
"""
AXES = ("data", "tensor", "sequence", "pipeline")
# Of arrays that live on the device, in the order of a bar.
SERIES = ("--products", "--attention", "--tensor", "--data", "--sequence", "--pipeline", "--several", "--other")


def colour_of_axes(axes: str) -> str:
    """The colour of axes joined by " x ", as a CSS value."""
    return f"var(--{axes})" if axes in AXES else "var(--several)"


def series(i: int) -> str:
    """The colour of part number `i` of a bar, as a CSS value."""
    return f"var({SERIES[i % len(SERIES)]})"
