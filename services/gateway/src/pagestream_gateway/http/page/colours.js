// One colour for a request wherever it shows: of the streams by their number, of others by their id.

const STREAMS = ["#3f7fd1", "#e58a1f", "#3ba55d", "#d1495b", "#8e63c7", "#c7a008", "#1f9e9e", "#d874b0",
  "#7a8b2a", "#5b6ee1", "#b5651d", "#4f9d3a", "#a3456f", "#2f8fb3", "#9c7a3c", "#6c6f7d"];
const names = new Map(); // request id -> {colour, name}

// Gives a request the colour and the name of a stream, counted from 0.
export function nameStream(id, number) {
  if (!names.has(id)) names.set(id, { colour: streamColour(number), name: `stream ${number + 1}` });
}

export const streamColour = (number) => STREAMS[number % STREAMS.length];

export function colourOf(id) {
  if (!names.has(id)) {
    let hash = 0;
    for (const each of id) hash = (hash * 31 + each.codePointAt(0)) >>> 0;
    names.set(id, { colour: `hsl(${hash % 360} 55% 52%)`, name: `request ${id.slice(-8)}` });
  }
  return names.get(id).colour;
}

export const nameOf = (id) => (colourOf(id), names.get(id).name);
