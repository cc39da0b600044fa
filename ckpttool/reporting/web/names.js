/* Names and their tree. There may be a hundred thousand, and a name may have as many parts: nothing recurses. */

function decoded({ shared, rest }) {
  let before = "";
  return rest.map((end, i) => (before = before.slice(0, shared[i]) + end));
}

function treeOf(names) {
  const root = { name: "", path: "", parent: null, kids: [], tensor: -1, level: 0, open: true };
  const nodes = [root];
  names.forEach((name, tensor) => {
    let node = root;
    for (const part of name.split(".")) {
      node.index ??= new Map();
      let kid = node.index.get(part);
      if (!kid) {
        kid = { name: part, path: "", parent: node, kids: [], tensor: -1, level: 0, open: false };
        node.index.set(part, kid);
        node.kids.push(kid);
        nodes.push(kid);
      }
      node = kid;
    }
    node.tensor = tensor;
  });
  return { root, nodes: joined(nodes, names) };
}

/* A module that holds nothing but another module needs no line of its own. Parents stand before their kids. */
function joined(nodes, names) {
  const gone = new Set();
  for (const node of nodes) {
    delete node.index;
    if (gone.has(node)) continue;
    const parts = [node.name];
    while (node.parent && node.tensor < 0 && node.kids.length === 1) {
      const [kid] = node.kids;
      parts.push(kid.name);
      gone.add(kid);
      node.tensor = kid.tensor;
      node.kids = kid.kids;
    }
    node.name = parts.join(".");
    for (const kid of node.kids) kid.parent = node;
  }
  const kept = nodes.filter((node) => !gone.has(node));
  for (const node of kept) {
    if (!node.parent) continue;
    node.level = node.parent.level + 1;
    node.path = node.parent.parent ? `${node.parent.path}.${node.name}` : node.name;
  }
  return kept;
}

/* Sums of all tensors in a module: bytes (those of another name for the same tensor once), the range, what is not
 * finite, and how far the farthest has moved. */
function summed(nodes, tensors) {
  for (const node of nodes) Object.assign(node, { bytes: 0, count: 0, bad: 0, most: -1, moved: -1, changed: 0 });
  for (const node of [...nodes].reverse()) {
    if (node.tensor >= 0) {
      const tensor = tensors[node.tensor];
      node.count += 1;
      node.bytes += tensor.again ? 0 : tensor.bytes;
      node.bad += tensor.bad ? 1 : 0;
      node.changed += tensor.change ? 1 : 0;
      node.most = Math.max(node.most, Math.abs(tensor.min ?? -1), Math.abs(tensor.max ?? -1));
      node.moved = Math.max(node.moved, tensor.change ? farness(tensor.change) : -1);
    }
    const above = node.parent;
    if (!above) continue;
    for (const name of ["bytes", "count", "bad", "changed"]) above[name] += node[name];
    for (const name of ["most", "moved"]) above[name] = Math.max(above[name], node[name]);
  }
}

/* By what differences are ordered: the relative one, and before all of them what can't be measured. */
function farness(change) {
  return change.relative === null || change.relative === undefined || change.nans ? Infinity : change.relative;
}

/* The tensors as objects, from the columns of the page. */
function tensorsOf(columns) {
  const names = decoded(columns.names);
  const tensors = names.map((name, i) => {
    const [dtype, shape, bytes] = columns.forms[columns.form[i]];
    const figures = columns.bins ? { min: columns.min[i], max: columns.max[i], mean: columns.mean[i], std: columns.std[i], bins: columns.bins[i] } : {};
    return { name, dtype, shape, bytes, ...figures };
  });
  for (const [i, owner] of columns.shared) tensors[i].shared = names[owner];
  for (const i of columns.again) tensors[i].again = true;
  for (const [i, count] of columns.bad ?? []) tensors[i].bad = count;
  return tensors;
}
