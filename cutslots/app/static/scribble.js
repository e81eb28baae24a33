// Runs once for the component #canvas. Scribbles are stored here, one digit for each pixel: 0 none, 1 object,
// 2 background. They are sent to the server when a stroke ends. Gradio provides `element`, `props` and `watch`.
const COLORS = [[0, 0, 0, 0], [0, 114, 178, 255], [213, 94, 0, 255]];
const STEPS = { ArrowLeft: [-2, 0], ArrowRight: [2, 0], ArrowUp: [0, -2], ArrowDown: [0, 2], ' ': [0, 0] };
let canvas, scribbles, last, cursor;  // last: pixel of the pointer during a stroke; cursor: pixel of the arrow keys
const clamp = (value, max) => Math.min(Math.max(value, 0), max);
const reset = () => {
  canvas = element.querySelector('canvas');
  scribbles = Uint8Array.from(props.value.scribbles, Number);
  last = cursor = null;
  draw();
};
const draw = () => {
  const context = canvas.getContext('2d'), image = context.createImageData(canvas.width, canvas.height);
  scribbles.forEach((value, i) => image.data.set(COLORS[value], 4 * i));
  context.putImageData(image, 0, 0);
  if (cursor) context.fillRect(cursor[0] - 1, cursor[1] - 1, 3, 3);
};
const mark = (x, y) => {
  const brush = Number(document.querySelector('#brush :checked').value), { width, height } = canvas;
  for (let row = clamp(y - 1, height); row < clamp(y + 2, height); row++)
    scribbles.fill(brush, row * width + clamp(x - 1, width), row * width + clamp(x + 2, width));
};
const stroke = (x, y) => {
  const [x0, y0] = last ?? [x, y], steps = Math.max(Math.abs(x - x0), Math.abs(y - y0), 1);
  for (let i = 0; i <= steps; i++)
    mark(Math.round(x0 + (x - x0) * i / steps), Math.round(y0 + (y - y0) * i / steps));
  last = [x, y];
  draw();
};
const strokeTo = ({ offsetX, offsetY }) => stroke(Math.floor(offsetX / canvas.clientWidth * canvas.width),
                                                  Math.floor(offsetY / canvas.clientHeight * canvas.height));
const send = () => { last = null; props.value = { ...props.value, scribbles: scribbles.join('') }; };
element.addEventListener('pointerdown', (event) => {
  if (event.target !== canvas || event.button) return;
  canvas.setPointerCapture(event.pointerId);
  cursor = null;
  strokeTo(event);
});
element.addEventListener('pointermove', (event) => { if (last) strokeTo(event); });
for (const end of ['pointerup', 'pointercancel']) element.addEventListener(end, () => { if (last) send(); });
element.addEventListener('keydown', (event) => {
  const step = event.target === canvas && STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  const [x, y] = cursor ?? [canvas.width >> 1, canvas.height >> 1];
  cursor = [clamp(x + step[0], canvas.width - 1), clamp(y + step[1], canvas.height - 1)];
  if (event.key === ' ') { mark(...cursor); send(); }
  draw();
});
element.addEventListener('focusout', () => { cursor = null; draw(); });
watch('value', reset);
reset();
