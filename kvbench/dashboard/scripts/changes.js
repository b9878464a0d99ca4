// Differences between two texts by words.

const LARGEST = 8e6; // cells of the table of common subsequences: some 16 MB

/** Split two texts into pieces [text, differs] each. */
function findChanges(theirs, ours) {
  const [a, b] = [theirs, ours].map((text) => text.match(/\S+\s*|\s+/g) ?? []);
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const [x, y] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const [keepX, keepY] = findCommon(x, y);
  const join = (words, middle, kept) =>
    mergePieces([
      ...words.slice(0, start).map((word) => [word, false]),
      ...middle.map((word, i) => [word, !kept[i]]),
      ...words.slice(words.length - end).map((word) => [word, false]),
    ]);
  return [join(a, x, keepX), join(b, y, keepY)];
}

/** Mark the words of two lists that belong to a longest common subsequence; none if the lists are too long. */
function findCommon(x, y) {
  const [keepX, keepY] = [x, y].map((words) => new Array(words.length).fill(false));
  const wide = y.length + 1;
  if ((x.length + 1) * wide > LARGEST) return [keepX, keepY];
  const length = new Uint16Array((x.length + 1) * wide);
  for (let i = x.length - 1; i >= 0; i -= 1) {
    for (let j = y.length - 1; j >= 0; j -= 1) {
      length[i * wide + j] =
        x[i] === y[j]
          ? length[(i + 1) * wide + j + 1] + 1
          : Math.max(length[(i + 1) * wide + j], length[i * wide + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < x.length && j < y.length;) {
    if (x[i] === y[j]) {
      keepX[i] = keepY[j] = true;
      i += 1;
      j += 1;
    } else if (length[(i + 1) * wide + j] >= length[i * wide + j + 1]) i += 1;
    else j += 1;
  }
  return [keepX, keepY];
}

function mergePieces(pieces) {
  const merged = [];
  for (const [text, differs] of pieces) {
    if (merged.length && merged.at(-1)[1] === differs) merged.at(-1)[0] += text;
    else merged.push([text, differs]);
  }
  return merged;
}
