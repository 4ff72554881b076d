"""The style of a report: light or dark as the reader's system is, and dark ink on paper."""

STYLE = """
:root{--paper:#fff;--ink:#1b2330;--soft:#5b6675;--rule:#e3e7ed;--card:#f5f7fa;--a:#2158d0;
--b:#c2570c;--c:#0f8a5f;--quiet:#98a2b0}
@media (prefers-color-scheme:dark){:root{--paper:#12161d;--ink:#e8ecf2;--soft:#a2adbb;
--rule:#2b333f;--card:#1b212b;--a:#7ba7ff;--b:#f4a259;--c:#4fd3a0;--quiet:#6f7b8a}}
@media print{:root{--paper:#fff;--ink:#000;--soft:#444;--rule:#ccc;--card:#fff;--a:#2158d0;
--b:#c2570c;--c:#0f8a5f;--quiet:#888}figure,table,.tile{break-inside:avoid}h2{break-after:avoid}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1000px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.15rem;margin:0;font-weight:600}
h2{font-size:1.1rem;margin:2.4rem 0 .3rem;border-top:1px solid var(--rule);padding-top:1.2rem}
p{margin:.3rem 0;color:var(--soft);max-width:72ch}
.subtitle{font-size:.9rem}
.verdict{color:var(--ink);font-size:1.45rem;line-height:1.35;font-weight:600;margin:1rem 0 1.2rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
.tile span,.tile small{display:block;color:var(--soft);font-size:.82rem}
.tile strong{display:block;font-size:1.3rem;line-height:1.3}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:18px}
figure{margin:.6rem 0;max-width:560px}
svg{width:100%;height:auto;display:block}
figcaption{color:var(--soft);font-size:.86rem}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
svg .name,svg .value{fill:var(--ink)}
svg .value{font-weight:600}
.grid{stroke:var(--rule);stroke-width:1}
.frame{stroke:var(--quiet);fill:none}
.line{fill:none;stroke-width:2}
.line.a,.dot.a{stroke:var(--a)}.line.b,.dot.b{stroke:var(--b)}.line.c,.dot.c{stroke:var(--c)}
.line.quiet,.dot.quiet{stroke:var(--quiet)}.line.ink{stroke:var(--ink);stroke-width:1.2}
.dot{fill:var(--paper);stroke-width:2.5}
.dot.a{fill:var(--a)}.dot.b{fill:var(--b)}.dot.c{fill:var(--c)}
.fill.a{fill:var(--a)}.fill.b{fill:var(--b)}.fill.c{fill:var(--c)}.fill.quiet{fill:var(--quiet)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.86rem;margin:0}
.key::before{content:"";display:inline-block;width:18px;border-top:3px solid;margin-right:6px;
vertical-align:middle}
.key.dashed::before{border-top-style:dashed}
.key.a::before{border-color:var(--a)}.key.b::before{border-color:var(--b)}
.key.c::before{border-color:var(--c)}.key.quiet::before{border-color:var(--quiet)}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;margin:.6rem 0;min-width:100%}
th,td{padding:5px 10px 5px 0;text-align:right;border-bottom:1px solid var(--rule);
font-variant-numeric:tabular-nums;white-space:nowrap}
th{color:var(--soft);font-weight:500;white-space:normal;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:9rem}
tr.strong td{font-weight:600}
pre{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px;
white-space:pre-wrap;overflow-wrap:anywhere;font-size:.86rem}
ul{padding-left:1.2rem;color:var(--soft)}
""".strip()
