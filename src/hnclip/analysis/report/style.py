"""The look of a report: light and dark, from a phone to a wide screen, and on paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #1b1e24; --quiet: #565c67; --line: #dcdde0; --link: #0a5a8c;
  --paper: #ffffff; --stripe: #efefec; --shade: #1b1e2433;
  --good: #0a6a4e; --note: #0a5a8c; --act: #a33b00;
  --good-tint: #e7f3ee; --note-tint: #e7f0f7; --act-tint: #fceee4;
  --mark: #ffe7a3; --mark-ink: #33270a; --mark-line: #b98a00;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #131519; --card: #1c1f25; --ink: #e5e7eb; --quiet: #a4abb6; --line: #353a43; --link: #83c3ef;
    --paper: #c6cad1; --stripe: #191c21; --shade: #000000b3;
    --good: #66d1a8; --note: #83c3ef; --act: #ffa270;
    --good-tint: #16302a; --note-tint: #172b3b; --act-tint: #3a2418;
    --mark: #574511; --mark-ink: #ffeebd; --mark-line: #c9a227;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-padding-top: 1rem; }
@media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
body {
  margin: 0 auto; max-width: 78rem; padding: clamp(1.5rem, 5vw, 3.5rem) clamp(1.125rem, 4vw, 2.5rem) 3rem;
  background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", Arial, sans-serif;
}
h1, h2, h3 { line-height: 1.25; text-wrap: balance; margin: 0; }
h1 { font-size: clamp(1.65rem, 1.2rem + 2.2vw, 2.5rem); letter-spacing: -.02em; margin-bottom: 1rem; max-width: 50rem; }
h2 { font-size: 1.375rem; letter-spacing: -.01em; margin-bottom: 1rem; }
h3 { font-size: 1.0625rem; }
p, figcaption { max-width: 46rem; margin: 0 0 .75rem; }
header { padding-bottom: 1.5rem; border-bottom: 3px solid var(--ink); }
header h1 + p { font-size: 1.125rem; }
header p:last-child { margin-bottom: 0; }
section { padding-top: 2.75rem; }
section > * + * { margin-top: 1.25rem; }
section > p + p { margin-top: 0; }
section > h2 + * { margin-top: 0; }
a { color: var(--link); }
:focus-visible { outline: 2px solid var(--link); outline-offset: 3px; border-radius: .25rem; }
svg { flex: none; width: 1.25em; height: 1.25em; fill: none; stroke: currentColor; stroke-width: 2;
  stroke-linecap: round; stroke-linejoin: round; }

nav { margin-top: 1.5rem; }
nav p { margin: 0; color: var(--quiet); font-size: .875rem; font-weight: 600; }
nav ol { list-style: none; margin: .25rem 0 0; padding: 0; }
nav li { border-bottom: 1px solid var(--line); }
nav a { display: flex; align-items: center; min-height: 2.75rem; padding: .375rem 0; text-decoration: none; }
nav a:hover { text-decoration: underline; }

.scroll { overflow-x: auto; }
.remark, figcaption { color: var(--quiet); font-size: .9375rem; }
.remark { margin-top: .75rem; }

/* A shadow at the right edge until the last column is in sight: the cover scrolls with the table, the shadow stays. */
.scroll.table { border: 1px solid var(--line); border-radius: .625rem; background:
  linear-gradient(to left, var(--card) 1.5rem, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--shade), transparent) right / 1.5rem 100% no-repeat scroll, var(--card); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .55rem 1rem; text-align: right; vertical-align: top; white-space: nowrap;
  overflow-wrap: break-word; }
tbody tr { border-top: 1px solid var(--line); }
th:first-child { text-align: start; position: sticky; left: 0; background: var(--card); }
thead th { color: var(--quiet); font-size: .875rem; font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; }
.long { white-space: normal; overflow-wrap: anywhere; text-align: start; min-width: 14rem; }
th.long:first-child { position: static; }

figure { margin: 0; }
.paper { background: var(--paper); border: 1px solid var(--line); border-radius: .625rem; padding: .75rem;
  isolation: isolate; }
/* On darkened paper white becomes the paper and colours keep their hue: nothing glares, nothing is inverted. */
.paper img { display: block; margin: 0 auto; height: auto; mix-blend-mode: multiply;
  width: min(100%, var(--width)); min-width: min(38rem, var(--width)); }
.drawing figcaption { margin-top: .625rem; }

.findings { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.finding { --tone: var(--note); --tint: var(--note-tint); display: flex; flex-direction: column; overflow: hidden;
  background: var(--card); border: 1px solid var(--line); border-top: 4px solid var(--tone); border-radius: .625rem;
  padding: 1rem 1.25rem 1.25rem; }
.finding.good { --tone: var(--good); --tint: var(--good-tint); }
.finding.act { --tone: var(--act); --tint: var(--act-tint); }
.finding p { margin: 0; }
.level { display: flex; align-items: center; gap: .4rem; color: var(--tone); font-size: .875rem; font-weight: 600; }
.finding h3 { margin-top: .5rem; }
.finding .number { font-size: 1.75rem; line-height: 1.2; font-weight: 650; letter-spacing: -.02em; margin: .5rem 0;
  font-variant-numeric: tabular-nums; }
.finding .number + p { margin-bottom: 1rem; }
.finding .advice { margin-top: auto; padding: .625rem .875rem; background: var(--tint); border-radius: .375rem; }
.advice code { font-size: .9em; white-space: nowrap; }
.advice b { display: block; color: var(--tone); font-size: .875rem; }

.row { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(12.5rem, 20rem); gap: 1.5rem; padding: 1rem;
  background: var(--card); border: 1px solid var(--line); border-radius: .625rem; scroll-snap-type: x proximity; }
.shown { scroll-snap-align: center; }
.shown > img, .shown > .gap { display: block; width: 100%; height: auto; aspect-ratio: 4 / 3; object-fit: contain;
  background: var(--stripe); border-radius: .375rem; }
.shown p { margin: 0; font-size: .875rem; line-height: 1.55; color: var(--ink); }
.shown .label { margin: .625rem 0 .25rem; font-size: .9375rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.query { position: relative; }
.query::after { content: ""; position: absolute; inset-block: 0; inset-inline-end: -.75rem;
  border-inline-end: 1px solid var(--line); }
.query .label { color: var(--link); }
.shown .cut { color: var(--quiet); font-style: italic; margin-top: .375rem; }
mark { background: var(--mark); color: var(--mark-ink); border-radius: .15em; padding: .05em .1em;
  text-decoration: underline 1px var(--mark-line); text-underline-offset: .18em; -webkit-box-decoration-break: clone;
  box-decoration-break: clone; }

.gap { display: flex; align-items: flex-start; gap: .625rem; max-width: 46rem; padding: .75rem 1rem;
  color: var(--quiet); border: 1.5px dashed var(--quiet); border-radius: .625rem; background: var(--stripe); }
.gap b { color: var(--ink); }
.gap svg { margin-top: .175em; }
.shown > .gap { display: flex; align-items: center; justify-content: center; }
.shown > .gap svg { margin: 0; }
.row > .gap { align-self: start; margin: 0; }

footer { color: var(--quiet); font-size: .875rem; margin-top: 3.5rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }

@media (min-width: 64rem) {
  body:has(nav) { display: grid; grid-template-columns: 12rem minmax(0, 1fr); column-gap: 3rem; align-items: start; }
  body:has(nav) > :is(header, footer) { grid-column: 1 / -1; }
  nav { position: sticky; top: 1.5rem; margin-top: 2.75rem; max-height: calc(100vh - 3rem); overflow-y: auto; }
  nav a { min-height: 0; padding: .45rem 0; font-size: .9375rem; line-height: 1.35; }
}
@media print {
  :root { color-scheme: light; --page: #ffffff; }
  body { padding: 0; max-width: none; font-size: .875rem; }
  nav { display: none; }
  .scroll { overflow: visible; }
  .paper img, .long { min-width: 0; }
  th, td { white-space: normal; padding-inline: .5rem; }
  th:first-child { position: static; background: none; }
  .row { grid-auto-columns: minmax(0, 1fr); }
  mark, .advice, .finding { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  h2 { break-after: avoid; }
  .finding, figure, tr, .gap { break-inside: avoid; }
}
"""
