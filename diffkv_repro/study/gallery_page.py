"""The gallery's page: its colours, its style, its script. No part of it comes from elsewhere."""

# Text on ground, all at least 4.5 to 1 (WCAG 2.2 AA); verdicts differ in words and marks too, not in colour alone.
COLOURS = {
    "ink": ("#222222", "#FFFFFF"),
    "soft": ("#595959", "#FFFFFF"),
    "link": ("#00588A", "#FFFFFF"),
    "pass": ("#00573D", "#E3F4EE"),
    "refuted": ("#7A4300", "#FDF0DC"),
    "fail": ("#9B001C", "#FCE6E9"),
    "not-run": ("#4A4A4A", "#EFEFEF"),
    "button": ("#FFFFFF", "#00588A"),
}
MARKS = {"pass": "✓", "refuted": "≠", "fail": "✗", "not run": "–"}

_VARIABLES = " ".join(f"--{name}: {ink}; --{name}-ground: {ground};" for name, (ink, ground) in COLOURS.items())

STYLE = """
:root { VARIABLES }
* { box-sizing: border-box; }
body { font: 16px/1.5 Helvetica, Arial, sans-serif; color: var(--ink); background: var(--ink-ground);
  max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.2rem; line-height: 1.3; margin: 0 0 .3rem; }
a { color: var(--link); } .soft { color: var(--soft); font-size: .88rem; }
.skip { position: absolute; left: -99rem; } .skip:focus { left: 1rem; top: .5rem; background: white; padding: .5rem; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
form { display: flex; flex-wrap: wrap; gap: .6rem 1.2rem; align-items: end; position: sticky; top: 0; z-index: 1;
  background: var(--ink-ground); padding: .6rem 0; border-bottom: 1px solid #DDD; }
form label { display: block; font-size: .85rem; color: var(--soft); }
input, select, button { font: inherit; padding: .35rem .5rem; min-height: 2.5rem; border: 1px solid #767676;
  border-radius: 4px; background: white; color: var(--ink); max-width: 100%; }
button { background: var(--button-ground); color: var(--button); border-color: var(--button-ground); cursor: pointer; }
input { width: 20rem; }
article { border: 1px solid #DDD; border-radius: 6px; padding: 1rem; margin: 1rem 0; display: grid; gap: 0 1.2rem;
  grid-template-columns: 17rem minmax(0, 1fr); }
article { scroll-margin-top: 6rem; } article[hidden] { display: none; }
article > * { min-width: 0; } article > .wide { grid-column: 1 / -1; }
img { width: 100%; height: auto; border: 1px solid #DDD; } .noimage { border: 1px dashed #999; padding: 1rem; }
blockquote { margin: .4rem 0; padding-left: .8rem; border-left: 3px solid #0072B2; }
.badge { display: inline-block; border-radius: 4px; padding: 0 .45rem; font-size: .88rem; white-space: nowrap;
  margin: 0 .3rem .3rem 0; }
.pass { color: var(--pass); background: var(--pass-ground); }
.fail { color: var(--fail); background: var(--fail-ground); }
.refuted { color: var(--refuted); background: var(--refuted-ground); }
.not-run { color: var(--not-run); background: var(--not-run-ground); }
summary { cursor: pointer; padding: .5rem 0; color: var(--link); font-weight: bold; }
.scroll { overflow-x: auto; } iframe { width: 100%; min-width: 640px; border: 1px solid #DDD; display: block; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid #DDD;
  overflow-wrap: anywhere; }
td:first-child, th { overflow-wrap: normal; }
@media (max-width: 700px) {
  article { grid-template-columns: minmax(0, 1fr); padding: .7rem; } form { position: static; }
  input, select, form > div { width: 100%; }
  table.claims thead { position: absolute; left: -99rem; }
  table.claims, table.claims tbody, table.claims tr, table.claims td { display: block; width: 100%; border: 0; }
  table.claims tr { border-bottom: 1px solid #DDD; padding: .5rem 0; } table.claims td { padding: .1rem 0; }
  table.claims td[data-name]:not(:empty)::before { content: attr(data-name) ": "; color: var(--soft); }
}
@media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
@media print { form { display: none; } article { break-inside: avoid; } }
""".replace("VARIABLES", _VARIABLES)

SCRIPT = """
"use strict";
const cards = [...document.querySelectorAll("article")];
const query = document.getElementById("query"), paper = document.getElementById("paper");
const verdict = document.getElementById("verdict"), count = document.getElementById("count");
function filter() {
  const words = query.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const card of cards) {
    const text = card.dataset.text;
    card.hidden = !(words.every(word => text.includes(word))
      && (!paper.value || card.dataset.paper === paper.value)
      && (!verdict.value || card.dataset.verdicts.split(" ").includes(verdict.value)));
    shown += card.hidden ? 0 : 1;
  }
  count.textContent = shown === 1 ? "1 figure" : shown + " figures";
}
for (const control of [query, paper, verdict]) control.addEventListener("input", filter);
document.querySelector("form").addEventListener("submit", event => event.preventDefault());
document.querySelector("form").addEventListener("reset", () => setTimeout(filter));
// A figure is loaded when it is opened: forty at once are too much for a phone.
function load(details) {
  const frame = details.querySelector("iframe[data-src]");
  if (details.open && frame) { frame.src = frame.dataset.src; frame.removeAttribute("data-src"); }
}
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => load(details));
for (const link of document.querySelectorAll("a[data-opens]")) link.addEventListener("click", event => {
  const details = document.getElementById(link.dataset.opens);
  event.preventDefault();
  details.open = true;
  load(details);
  details.querySelector("summary").focus();
  details.scrollIntoView({block: "nearest"});
});
document.addEventListener("keydown", event => {
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    event.preventDefault();
    query.focus();
  }
});
if (innerWidth > 700) for (const details of document.querySelectorAll(".statements")) details.open = true;
filter();
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<link rel="icon" href="data:,">
<title>DiffKV and KVServe, reproduced</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#figures">Skip to the figures</a>
<header>
<h1>DiffKV and KVServe, reproduced</h1>
<p>{summary}</p>
<p>Each figure was drawn by a notebook, and each of its statements is a claim that was checked:
{verdicts}.</p>
</header>
<form role="search">
<div><label for="query">Search (press /)</label>
<input id="query" type="search" autocomplete="off" placeholder="keys, Figure 8, bandwidth ..."></div>
<div><label for="paper">Paper</label><select id="paper"><option value="">all</option>{papers}</select></div>
<div><label for="verdict">Verdict</label><select id="verdict"><option value="">all</option>{choices}</select></div>
<div><button type="reset">Show all</button></div>
<div id="count" role="status" aria-live="polite"></div>
</form>
<main id="figures">
{figures}
</main>
<h2>Not drawn yet</h2>
<div class="scroll"><table><thead><tr><th scope="col">figure</th><th scope="col">what it shows</th>
<th scope="col">notebook</th><th scope="col">claims</th></tr></thead><tbody>
{missing}
</tbody></table></div>
<script>{script}</script>
</body>
</html>
"""
