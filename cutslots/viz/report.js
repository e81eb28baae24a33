// A player shows the frames of a video: its slider selects one, its button plays them all at 12 frames per second.
for (const player of document.querySelectorAll('.player')) {
  const slider = player.querySelector('input'), button = player.querySelector('button');
  const name = button.getAttribute('aria-label').slice('play '.length);
  let timer = null;
  const setAction = action => { button.textContent = action; button.setAttribute('aria-label', `${action} ${name}`); };
  const showFrame = () => player.style.setProperty('--f', slider.value);
  slider.addEventListener('input', showFrame);
  button.addEventListener('click', () => {
    if (timer) { clearInterval(timer); timer = null; setAction('play'); return; }
    setAction('pause');
    timer = setInterval(() => { slider.value = (+slider.value + 1) % (+slider.max + 1); showFrame(); }, 1000 / 12);
  });
}
