"""What the browser gets besides pictures: the style of the page, and the scripts to pick, scribble and save with.

Gradio hands the scripts their component: its `element`, its `props`, `trigger` for events, `watch` for new values.
"""

STYLE = """
figure { margin: 0; flex: 1 1 150px; max-width: 320px; min-width: 0; }
figure div { position: relative; }
figure.big { flex: 2 1 280px; max-width: 480px; }
#picked figure { max-width: 240px; }
img { width: 100%; display: block; border-radius: 4px; aspect-ratio: var(--ratio); }
figure img { outline: 1px solid var(--border-color-primary); }
figcaption, .hint { font-size: .85rem; color: var(--body-text-color-subdued); margin: .25rem 0 0; }
.pictures { display: flex; flex-wrap: wrap; gap: 10px; align-items: flex-start; }
.cuts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(210px, 46%), 1fr)); }
.cuts img, .board * { image-rendering: pixelated; }
.cuts + ul { padding-left: 1.2rem; margin: .8rem 0 0; list-style: disc; }
.big img, canvas { cursor: crosshair; }
.big span { position: absolute; transform: translate(-50%, -50%); pointer-events: none; color: #fff;
  background: rgba(0, 0, 0, .75); border-radius: 1em; padding: 0 .45em; font: 600 .8rem/1.4 system-ui, sans-serif; }
.slots { display: grid; grid-template-columns: repeat(auto-fill, minmax(92px, 1fr)); gap: 8px; margin: .6rem 0; }
.slot { border: 4px solid var(--colour); border-radius: 8px; padding: 0; cursor: pointer; overflow: hidden;
  background: var(--background-fill-secondary); font: 600 .75rem/1.9 system-ui, sans-serif; }
.slot.faded { opacity: .45; }
.slot[aria-pressed=true] { outline: 3px solid var(--body-text-color); outline-offset: 2px; }
.said { border-left: 10px solid var(--colour); padding-left: .6rem; margin: .6rem 0 .5rem; font-weight: 600; }
.board { position: relative; max-width: 480px; touch-action: none; }
canvas { position: absolute; inset: 0; width: 100%; height: 100%; }
:is(canvas, .slot):focus-visible { outline: 3px solid #0072b2; outline-offset: 2px; }
"""

PICK = """
element.addEventListener('click', ({ target, offsetX, offsetY }) => {
  const slot = target.closest('[data-slot]'), { width, height, naturalWidth, naturalHeight } = target;
  if (slot) trigger('select', { slot: Number(slot.dataset.slot) });
  else if (target.matches('.big img'))
    trigger('select', { x: offsetX / width * naturalWidth, y: offsetY / height * naturalHeight });
});
"""

BOARD = """<div class="board"><img src="${value.image}" alt="The picture that is cut">
<canvas width="${value.width}" height="${value.height}" tabindex="0" role="application"
 aria-label="Scribbles. Draw with the pointer; or move with the arrow keys and mark with the space bar."></canvas></div>
"""

# Marks are kept here, a digit for each pixel; the page is told of them when a stroke ends.
SCRIBBLE = """
const COLOURS = [[0, 0, 0, 0], [0, 114, 178, 255], [213, 94, 0, 255]];
const STEPS = { ArrowLeft: [-2, 0], ArrowRight: [2, 0], ArrowUp: [0, -2], ArrowDown: [0, 2], ' ': [0, 0] };
let canvas, marks, last, cursor;  // where the pointer is, and where the arrow keys have led
const within = (value, most) => Math.min(Math.max(value, 0), most);
const start = () => {
  canvas = element.querySelector('canvas');
  marks = Uint8Array.from(props.value.marks, Number);
  last = cursor = null;
  draw();
};
const draw = () => {
  const pen = canvas.getContext('2d'), picture = pen.createImageData(canvas.width, canvas.height);
  marks.forEach((mark, i) => picture.data.set(COLOURS[mark], 4 * i));
  pen.putImageData(picture, 0, 0);
  if (cursor) pen.fillRect(cursor[0] - 1, cursor[1] - 1, 3, 3);
};
const mark = (x, y) => {
  const brush = Number(document.querySelector('#brush :checked').value), { width, height } = canvas;
  for (let v = within(y - 1, height); v < within(y + 2, height); v++)
    marks.fill(brush, v * width + within(x - 1, width), v * width + within(x + 2, width));
};
const stroke = (x, y) => {
  const [x0, y0] = last ?? [x, y], steps = Math.max(Math.abs(x - x0), Math.abs(y - y0), 1);
  for (let i = 0; i <= steps; i++)
    mark(Math.round(x0 + (x - x0) * i / steps), Math.round(y0 + (y - y0) * i / steps));
  last = [x, y];
  draw();
};
const follow = ({ offsetX, offsetY }) => stroke(Math.floor(offsetX / canvas.clientWidth * canvas.width),
                                                Math.floor(offsetY / canvas.clientHeight * canvas.height));
const tell = () => { last = null; props.value = { ...props.value, marks: marks.join('') }; };
element.addEventListener('pointerdown', (event) => {
  if (event.target !== canvas || event.button) return;
  canvas.setPointerCapture(event.pointerId);
  cursor = null;
  follow(event);
});
element.addEventListener('pointermove', (event) => { if (last) follow(event); });
for (const end of ['pointerup', 'pointercancel']) element.addEventListener(end, () => { if (last) tell(); });
element.addEventListener('keydown', (event) => {
  const step = event.target === canvas && STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  const [x, y] = cursor ?? [canvas.width >> 1, canvas.height >> 1];
  cursor = [within(x + step[0], canvas.width - 1), within(y + step[1], canvas.height - 1)];
  if (event.key === ' ') { mark(...cursor); tell(); }
  draw();
});
element.addEventListener('focusout', () => { cursor = null; draw(); });
watch('value', start);
start();
"""

SAVE = """(data) => {
  const href = 'data:application/zip;base64,' + data;
  if (data) Object.assign(document.createElement('a'), { href, download: 'masks.zip' }).click();
  return '';
}"""
