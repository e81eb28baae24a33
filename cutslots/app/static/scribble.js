// Runs once for the component #canvas. Strokes are stored here: [label, diameter, x, y, x, y, ...] in pixels of the
// image, label 0 erases. They are sent to the server DELAY ms after the last change, never during a stroke. Gradio
// provides `element`, `props` and `watch`.
const DELAY = 150, SCALE = 2, STEP = 6;  // SCALE: pixels of the canvas for one of the image; STEP: of the arrow keys
const ARROWS = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] };
let canvas, token, strokes, timer, drawing, pointer, cursor;  // drawing: a stroke of the pointer; cursor: of the arrow keys
const clamp = (value, max) => Math.min(Math.max(value, 0), max);
const round = (value) => Math.round(value * 10) / 10;
const brush = () => [Number(element.querySelector('[name=brush]:checked').value),
                     Number(element.querySelector('[name=size]').value)];
const color = (label) => getComputedStyle(element.querySelector(`[name=brush][value="${label}"] + i`)).backgroundColor;
const path = (context, [, , x, y, ...rest]) => {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + 0.01, y);  // a click is a dot
  for (let i = 0; i < rest.length; i += 2) context.lineTo(rest[i], rest[i + 1]);
  context.stroke();
};
const draw = () => {
  const context = canvas.getContext('2d');
  context.setTransform(SCALE, 0, 0, SCALE, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.lineCap = context.lineJoin = 'round';
  for (const stroke of strokes) {
    context.globalCompositeOperation = stroke[0] ? 'source-over' : 'destination-out';
    context.strokeStyle = stroke[0] ? color(stroke[0]) : '#000';  // opaque: an eraser takes everything away
    context.lineWidth = stroke[1];
    path(context, stroke);
  }
  context.globalCompositeOperation = 'source-over';
  if (cursor) drawCursor(context);
};
const drawCursor = (context) => {
  for (const [style, width] of [['#000', 4], ['#fff', 2]]) {
    Object.assign(context, { strokeStyle: style, lineWidth: width });
    context.beginPath();
    context.arc(...cursor, Math.max(brush()[1] / 2, 3), 0, 7);
    context.stroke();
  }
};
const reset = () => {
  canvas = element.querySelector('canvas');
  if (props.value.token !== token || props.value.strokes.length < 2) hideOutlines();
  [token, strokes] = [props.value.token, props.value.strokes.map((stroke) => [...stroke])];
  clearTimeout(timer);
  drawing = cursor = null;
  draw();
};
const hideOutlines = () => { element.querySelector('.outlines').hidden = true; };
const send = () => {
  clearTimeout(timer);
  timer = setTimeout(() => { props.value = { ...props.value, strokes: strokes.map((stroke) => [...stroke]) }; }, DELAY);
};
const pixel = ({ clientX, clientY }) => {
  const { left, top, width, height } = canvas.getBoundingClientRect();
  return [round(clamp((clientX - left) / width, 1) * canvas.width / SCALE),
          round(clamp((clientY - top) / height, 1) * canvas.height / SCALE)];
};
const undo = () => { strokes.pop(); draw(); send(); };
const clear = () => { strokes = []; draw(); send(); };

element.addEventListener('pointerdown', (event) => {
  if (event.target !== canvas || event.button || drawing) return;
  canvas.setPointerCapture(event.pointerId);
  clearTimeout(timer);
  cursor = null;
  drawing = [...brush(), ...pixel(event)];
  pointer = event.pointerId;
  strokes.push(drawing);
  draw();
});
element.addEventListener('pointermove', (event) => {
  if (!drawing || event.pointerId !== pointer) return;  // a second finger, or a palm
  const [x, y] = pixel(event), [x0, y0] = drawing.slice(-2);
  if (Math.hypot(x - x0, y - y0) < 2) return;  // fewer points
  drawing.push(x, y);
  draw();
});
for (const end of ['pointerup', 'pointercancel'])
  element.addEventListener(end, ({ pointerId }) => { if (drawing && pointerId === pointer) { drawing = null; send(); } });
element.addEventListener('click', ({ target }) => {
  const action = target.closest('[data-action]')?.dataset.action;
  if (action) ({ undo, clear })[action]();
});
element.addEventListener('keydown', (event) => {
  if (event.target !== canvas) return;
  const step = ARROWS[event.key], undoes = event.key === 'z' && (event.ctrlKey || event.metaKey);
  if (!step && event.key !== ' ' && !undoes) return;
  event.preventDefault();
  if (undoes) return undo();
  const [x, y] = cursor ?? [canvas.width / SCALE / 2, canvas.height / SCALE / 2];
  cursor = step ? [clamp(x + step[0], canvas.width / SCALE), clamp(y + step[1], canvas.height / SCALE)] : [x, y];
  if (event.key === ' ') strokes.push([...brush(), ...cursor]);
  if (step && event.shiftKey) strokes.push([...brush(), x, y, ...cursor]);
  if (event.key === ' ' || event.shiftKey) send();
  draw();
});
element.addEventListener('focusout', () => { cursor = null; draw(); });
watch('value', reset);
reset();
