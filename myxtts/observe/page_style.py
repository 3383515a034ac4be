"""How the report page looks, light and dark, wide and narrow; no content. Text for a `<style>` element."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #fff; --ink: #1c2128; --soft: #57606a; --rule: #dde1e6;
  --on: #fff; --good: #1a7f4e; --warn: #a35200; --bad: #b3261e; --info: #2563b8; --well: #f4f5f7;
  --1: #2563b8; --2: #c2570c; --3: #1a7f4e; --4: #7546bd; --5: #b4286f; --6: #59636e; --7: #0b7285; --8: #8a6a00; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #191e24; --ink: #e4e8ed; --soft: #9aa5b1;
  --rule: #303842; --on: #10141a; --good: #5cc88f; --warn: #f0a35a; --bad: #ff8a80; --info: #7db2ff;
  --well: #11151a; --1: #7db2ff; --2: #f5a05e; --3: #5cc88f; --4: #bda1f5; --5: #f291c1; --6: #9aa5b1;
  --7: #5bc7dc; --8: #e3c255; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.15rem; margin: 0 0 12px; }
h3 { font-size: 1rem; margin: 20px 0 8px; }
h2 + h3 { margin-top: 0; }
p { margin: 0 0 10px; }
header p, .note, .unit, .none, .xlabel, footer { color: var(--soft); font-size: .875rem; }
header { margin-bottom: 16px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 20px;
  margin-bottom: 16px; }
.sentence { font-size: 1.3rem; line-height: 1.4; font-weight: 600; max-width: 46em; }
.chip { display: inline-block; border-radius: 99px; padding: 1px 10px; font-size: .8rem; font-weight: 600;
  color: var(--on); background: var(--6); vertical-align: middle; }
.excellent, .good, .pass { background: var(--good); }
.minimum, .warn { background: var(--warn); }
.fail, .below { background: var(--bad); }
.info { background: var(--info); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(46%, 220px), 1fr)); gap: 10px;
  margin: 16px 0 0; }
.tiles div { background: var(--well); border-radius: 8px; padding: 8px 12px; }
.tiles dt { color: var(--soft); font-size: .8rem; }
.tiles dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 20px 28px; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .95rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0 16px; margin: 2px 0 12px; font-size: .85rem; }
.bars + .legend, .lanes + .legend { margin: 8px 0 0; }
.key::before { content: ""; display: inline-block; width: .7em; height: .7em; border-radius: 2px;
  margin-right: 5px; background: var(--c); }
.plot { display: grid; grid-template-columns: 3.2rem minmax(0, 1fr); padding-right: .8rem; font-size: .75rem;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.ys { position: relative; }
.ys span { position: absolute; right: .5rem; transform: translateY(50%); line-height: 1; white-space: nowrap; }
.area { border: solid var(--rule); border-width: 0 0 1px 1px; }
.area svg { display: block; width: 100%; height: 180px; overflow: visible; }
.xs { position: relative; height: 1.4rem; }
.plot .xs { grid-column: 2; }
.xs span { position: absolute; top: .2rem; transform: translateX(-50%); white-space: nowrap; }
.xlabel { text-align: center; margin: 0; font-size: .75rem; padding-left: 3.2rem; }
path { fill: none; vector-effect: non-scaling-stroke; stroke-linecap: round; stroke-linejoin: round; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { stroke: var(--c); stroke-width: 2; }
.faint { stroke-width: 1; opacity: .35; }
.dots { stroke: var(--c); stroke-width: 7; }
.bars { position: relative; height: 22px; background: var(--well); border-radius: 4px; overflow: hidden; }
.tall { height: 34px; }
.bars i { position: absolute; top: 0; bottom: 0; min-width: 1px; overflow: hidden; font-style: normal;
  font-size: .72rem; line-height: 22px; padding-left: 3px; white-space: nowrap; background: var(--c);
  color: var(--on); border-right: 1px solid var(--card); }
.tall i { line-height: 34px; font-size: .85rem; padding-left: 8px; }
.lane { display: grid; grid-template-columns: 11rem minmax(0, 1fr); gap: 0 10px; margin-bottom: 4px; }
.lanes .who { font-size: .8rem; color: var(--soft); text-align: right; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.lanes { padding-right: .8rem; }
.lanes .xs { font-size: .75rem; color: var(--soft); }
figcaption + .lanes { margin-top: 8px; }
.meter { height: 10px; background: var(--rule); border-radius: 5px; overflow: hidden; min-width: 60px; }
.meter i { display: block; height: 100%; background: var(--info); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
.facts td { width: 100%; white-space: normal; }
.scroll + .scroll { margin-top: 16px; }
.scroll + .grid2 { margin-top: 20px; }
article + .note { margin-top: 14px; }
.grid2 + .note, .scroll + .note { margin: 12px 0 0; }
th { color: var(--soft); font-weight: 500; }
tr:last-child > * { border-bottom: 0; }
article { border-top: 1px solid var(--rule); padding: 14px 0 6px; }
h2 + article { border-top: 0; padding-top: 0; }
article p { margin: 4px 0; max-width: 60em; }
code, pre { font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
code { background: var(--well); border-radius: 4px; padding: 1px 5px; }
pre { margin: 8px 0 0; padding: 12px; background: var(--well); border-radius: 8px; overflow: auto;
  max-height: 480px; overflow-wrap: normal; }
summary { cursor: pointer; color: var(--soft); }
.c1, .s-gather, .s-host { --c: var(--1); }
.c2, .s-wait { --c: var(--2); }
.c3, .s-train, .s-compute { --c: var(--3); }
.c4, .s-upload, .s-copy { --c: var(--4); }
.c5, .s-encode { --c: var(--5); }
.c6, .s-other { --c: var(--6); }
.s-update { --c: var(--7); }
.s-handoff { --c: var(--8); }
@media (max-width: 640px) {
  main { padding: 14px 10px 32px; }
  section { padding: 14px 12px; }
  .sentence { font-size: 1.1rem; }
  .lane { grid-template-columns: minmax(0, 1fr); margin-bottom: 6px; }
  .lanes .who { text-align: left; }
  .bars .slim { font-size: 0; }
  th, td { padding-right: 8px; font-size: .82rem; }
}
@media print { body { background: #fff; } section { break-inside: avoid; } pre { max-height: none; } }
"""
