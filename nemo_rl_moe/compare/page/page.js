// Shows the values of the nearest step. Without it the charts are complete, only not read out.
const tip = document.getElementById('tip');
const text = v => v === null ? '-' : (v === 0 ? '0' : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(3)
  : String(+v.toPrecision(5)));
for (const figure of document.querySelectorAll('figure[data-points]')) {
  const data = JSON.parse(figure.dataset.points), svg = figure.querySelector('svg'), mark = svg.querySelector('.mark');
  const show = event => {
    const box = svg.getBoundingClientRect(), scale = data.width / box.width;
    const at = (event.clientX - box.left) * scale;
    let best = 0;
    data.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(data.x[best] - at)) best = i; });
    mark.setAttribute('x1', data.x[best]); mark.setAttribute('x2', data.x[best]); mark.style.display = '';
    tip.textContent = ['step ' + data.steps[best],
      ...data.lines.map(line => line.name + '  ' + text(line.values[best]))].join('\n');
    tip.style.display = 'block';
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = Math.max(8, left) + 'px'; tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 10) + 'px';
  };
  const hide = () => { tip.style.display = 'none'; mark.style.display = 'none'; };
  svg.addEventListener('pointermove', show); svg.addEventListener('pointerdown', show);
  svg.addEventListener('pointerleave', hide);
}
