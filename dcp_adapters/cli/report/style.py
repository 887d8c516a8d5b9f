"""How a report looks: one style sheet, for light and dark, on screens and on paper."""

STYLE = """
:root { color-scheme: light dark; --page: #f4f6f8; --card: #fff; --ink: #18212f; --soft: #5d6b7e; --line: #e2e7ed;
  --hot: #c2410c; --blue: #3468c9; --good: #15803d; --bad: #b91c1c; --on: #fff; --wash: #eef2f7; }
@media (prefers-color-scheme: dark) { :root { --page: #0e131a; --card: #171e28; --ink: #e7ecf3; --soft: #9aa7b8;
  --line: #2b3542; --hot: #fb8a3c; --blue: #6d9df0; --good: #4ade80; --bad: #f87171; --on: #1c0f04; --wash:
  #1f2834; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  "Helvetica Neue",
  "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 0 0 2px; }
h3 { font-size: 14px; margin: 0 0 6px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; max-width: 84ch; }
h1 + p { max-width: none; }
.soft { color: var(--soft); }
td:first-child { min-width: 320px; }
.alarm { color: var(--bad); font-weight: 700; }
.small { font-size: 13px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 24px;
  margin-top: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 25px; line-height: 1.2; font-weight: 650; }
.tile span { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.tile .name { color: var(--soft); }
ul.notes { list-style: none; margin: 18px 0 0; padding: 12px 20px; background: var(--card); border: 1px solid
  var(--line);
  border-radius: 10px; }
ul.notes li { padding: 3px 0 3px 26px; position: relative; overflow-wrap: anywhere; }
ul.notes li::before { position: absolute; left: 2px; font-weight: 700; }
li.bad::before { content: "\\2715"; color: var(--bad); }
li.look::before { content: "\\25B2"; color: var(--hot); font-size: 12px; top: 5px; }
li.good::before { content: "\\2713"; color: var(--good); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; margin-top: 10px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; border-bottom: 1px solid var(--line);
  padding: 4px 10px 4px 0; vertical-align: bottom; }
td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
tr:last-child td { border-bottom: 0; }
th.r, td.r { text-align: right; }
td.r { white-space: nowrap; }
.name { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12.5px;
  overflow-wrap: anywhere; }
.meter { display: inline-block; width: 90px; height: 9px; border-radius: 3px; background: var(--wash);
  overflow: hidden;
  vertical-align: middle; margin-left: 8px; }
.meter i { display: block; height: 100%; background: var(--blue); }
.meter i.hot { background: var(--hot); }
.stack { display: flex; height: 30px; border-radius: 6px; overflow: hidden; margin: 10px 0 4px; background:
  var(--wash); }
.stack i { display: block; background: var(--blue); border-right: 1px solid var(--card); }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; background:
  var(--blue); }
.k0 { opacity: 1; } .k1 { opacity: .62; } .k2 { opacity: .38; } .k3 { opacity: .22; } .k4 { opacity: .12; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); gap: 22px; margin-top: 12px; }
.cards.wide { grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); }
.broad svg { min-width: 780px; }
svg { display: block; width: 100%; height: auto; margin-top: 10px; }
svg text { font-size: 11px; fill: var(--soft); }
svg text.label { font-size: 12.5px; fill: var(--ink); }
svg text.on { fill: var(--on); } svg text.off { fill: var(--ink); }
.cell { fill: var(--hot); stroke: var(--line); stroke-width: 1; }
.bar { fill: var(--blue); } .hot { fill: var(--hot); }
.grid { stroke: var(--line); stroke-width: 1; }
.limit { stroke: var(--hot); stroke-width: 1; stroke-dasharray: 4 3; }
dt { font-weight: 600; margin-top: 10px; } dd { margin: 0 0 0 0; color: var(--soft); max-width: 90ch; }
summary { cursor: pointer; font-weight: 600; }
@media print { section, .tile { break-inside: avoid; } main { max-width: none; padding: 0; } }
"""
