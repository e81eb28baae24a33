// Runs once for the component #segmentation. Shows its outlines over the canvas, too. Gradio provides `element`, `watch`.
const show = () => {
  const source = element.querySelector('#outlines'), target = document.querySelector('#canvas .outlines');
  if (!target) return;
  target.hidden = !source;
  if (source) target.src = source.src;
};
watch('value', show);
show();
