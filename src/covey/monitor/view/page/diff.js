// Which parts of two lists of text are the same.

const MOST_LINES = 3000;

/** `[mark, line]` with marks "+", "-" and " ": the longest common lines stay. */
export function diffOf(old, now) {
  if (old.length * now.length > MOST_LINES ** 2) return [...old.map((line) => ["-", line]), ...now.map((line) => ["+", line])];
  const width = now.length + 1;
  const best = new Uint16Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = now.length - 1; j >= 0; j -= 1) {
      best[i * width + j] = old[i] === now[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  const out = [];
  let [i, j] = [0, 0];
  while (i < old.length || j < now.length) {
    if (i < old.length && j < now.length && old[i] === now[j]) out.push([" ", old[i++], j++]);
    else if (j >= now.length || (i < old.length && best[(i + 1) * width + j] >= best[i * width + j + 1])) out.push(["-", old[i++]]);
    else out.push(["+", now[j++]]);
  }
  return out;
}
