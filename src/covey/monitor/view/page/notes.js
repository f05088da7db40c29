// Tags and notes of runs, which the reader writes; they stay in this browser, since the server writes nothing.

const KEY = "notes";

function all() {
  try {
    return JSON.parse(localStorage.getItem(KEY) ?? "{}") ?? {};
  } catch {
    return {};
  }
}

/** `{tags, notes}` of a run, by its own id, so that a moved folder keeps them. */
export const noteOf = (run) => all()[run.id ?? run.path] ?? {};

/** Keep one of them; an empty text forgets it. */
export function saveNote(run, name, text) {
  const notes = all();
  notes[run.id ?? run.path] = { ...noteOf(run), [name]: text.trim() };
  localStorage.setItem(KEY, JSON.stringify(notes));
}
