// A plot as a picture to keep: its title above, its legend below.

const LINE = 18;

/** The address of a PNG of `drawn` (a canvas) with a title and the names of `lines` in their colours. */
export function pictureOf(drawn, title, lines, { paper, ink }) {
  const scale = devicePixelRatio;
  const named = [...new Map(lines.map((one) => [one.name, one])).values()];
  const canvas = document.createElement("canvas");
  canvas.width = drawn.width;
  const context = canvas.getContext("2d");
  const font = (weight) => `${weight} ${13 * scale}px system-ui, sans-serif`;
  context.font = font("normal");
  const places = placesOf(named.map((one) => context.measureText(textOf(one)).width + 14 * scale), drawn.width - 16 * scale);
  const rows = named.length ? places.at(-1)[1] + 1 : 0;
  const top = 26 * scale;
  canvas.height = top + drawn.height + rows * LINE * scale + 8 * scale;
  context.fillStyle = paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(drawn, 0, top);
  context.textBaseline = "top";
  context.fillStyle = ink;
  context.font = font("bold");
  context.fillText(title, 8 * scale, 8 * scale, canvas.width - 16 * scale);
  context.font = font("normal");
  named.forEach((one, at) => {
    const [x, y] = [8 * scale + places[at][0], top + drawn.height + places[at][1] * LINE * scale];
    context.fillStyle = one.stroke;
    context.fillText(one.mark ?? "●", x, y);
    context.fillStyle = ink;
    context.fillText(one.name, x + 16 * scale, y);
  });
  return canvas.toDataURL();
}

const textOf = (one) => `●  ${one.name}`;

/** `[left, row]` of boxes of these widths, in rows that are `most` wide. */
function placesOf(widths, most) {
  let [left, row] = [0, 0];
  return widths.map((width) => {
    if (left && left + width > most) [left, row] = [0, row + 1];
    const place = [left, row];
    left += width;
    return place;
  });
}
