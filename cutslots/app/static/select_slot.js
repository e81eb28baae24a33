// Runs once for the component #discovery. A click on a slot's button sends the slot; a click on the overlay sends the
// pixel. Gradio provides `element` and `trigger`.
element.addEventListener('click', ({ target, offsetX, offsetY }) => {
  const slot = target.closest('[data-slot]'), { width, height, naturalWidth, naturalHeight } = target;
  if (slot) trigger('select', { slot: Number(slot.dataset.slot) });
  else if (target.matches('.overlay img'))
    trigger('select', { x: offsetX / width * naturalWidth, y: offsetY / height * naturalHeight });
});
