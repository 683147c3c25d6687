// Figures as people read them. Each gives "–" for what is not known.

const NOTHING = "–";

/** Three significant digits: 0.62, 71.4, 1240. */
export function figure(n) {
  if (!Number.isFinite(n)) return NOTHING;
  if (n === 0 || n >= 99.95) return n.toFixed(0);
  return n >= 9.995 ? n.toFixed(1) : n.toFixed(2);
}

export function count(n) {
  return Number.isFinite(n) ? n.toLocaleString("en") : NOTHING;
}

/** Bytes in the units of disks and memory makers' papers: kB, MB, GB. */
export function bytes(n) {
  if (!Number.isFinite(n)) return NOTHING;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 999.5 && unit < units.length - 1) {
    n /= 1000;
    unit += 1;
  }
  return `${figure(n)} ${units[unit]}`;
}

export function milliseconds(ms) {
  if (!Number.isFinite(ms)) return NOTHING;
  return ms >= 1000 ? `${figure(ms / 1000)} s` : `${figure(ms)} ms`;
}

export function percent(share) {
  return Number.isFinite(share) ? `${Math.round(share * 100)} %` : NOTHING;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
