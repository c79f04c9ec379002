"""How the inspection page looks."""

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1d1f22;--soft:#63676e;--line:#e3e3df;
--bar:#3b6fb6;--bar2:#7fb0e6;--bar3:#b9c6d6;--bad:#b3261e;--badbg:#fdf0ee}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e8e9ea;--soft:#9aa0a8;
--line:#31353b;--bar:#6ea2e8;--bar2:#3f6ea8;--bar3:#4d5866;--bad:#ff8a80;--badbg:#2c1c1b}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 2px}
.sub{color:var(--soft);margin:0 0 14px;max-width:70ch}
code{font:13px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}
section{margin-top:36px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:24px;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{display:block}.tile small{color:var(--soft)}
.tile.bad{border-color:var(--bad);background:var(--badbg)}.tile.bad b{color:var(--bad)}
.notes{margin:18px 0 0;padding:12px 14px 12px 32px;background:var(--card);
border:1px solid var(--line);border-radius:10px}
.fits>input{position:absolute;opacity:0}
.fits>label{display:inline-block;padding:5px 12px;margin:0 6px 12px 0;border:1px solid var(--line);
border-radius:99px;background:var(--card);cursor:pointer;font:13px ui-monospace,monospace}
.fits>input:checked+label{background:var(--bar);border-color:var(--bar);color:var(--bg)}
.fits>input:focus-visible+label{outline:2px solid var(--ink);outline-offset:2px}
.fits>.grid{display:none}
#fit-crop:checked~.fit-crop,#fit-letterbox:checked~.fit-letterbox,
#fit-stretch:checked~.fit-stretch{display:grid}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(96px,1fr));gap:12px}
figure{margin:0;min-width:0}
.grid img{width:100%;height:auto;border-radius:6px;display:block}
.pixels{image-rendering:pixelated}
figcaption{font-size:13px;color:var(--soft);overflow-wrap:anywhere;margin-top:3px}
.pairs{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr));gap:12px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:10px;background:var(--card);
border:1px solid var(--line);border-radius:10px;padding:10px}
.pair img{height:96px;width:auto;max-width:100%;object-fit:contain;border-radius:6px;display:block}
.pair p{grid-column:1/-1;margin:0;font-size:13px;color:var(--soft)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;font-weight:600;color:var(--soft)}
th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.name{overflow-wrap:anywhere;min-width:8em}
td.bar{width:45%;min-width:90px;vertical-align:middle}
.bar div{display:flex;height:12px;border-radius:3px;overflow:hidden}
.bar i{display:block}
.train{background:var(--bar)}.val{background:var(--bar2)}.test{background:var(--bar3)}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 12px}
svg{max-width:100%;height:auto;display:block}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.axis{stroke:var(--line)}.dot{fill:var(--bar);fill-opacity:.55}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),1fr));gap:24px}
.good{color:var(--soft)}
"""
