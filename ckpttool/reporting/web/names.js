/* Names and their tree. There may be a hundred thousand, and a name may have as many parts: nothing recurses. */

function decoded({ shared, rest }) {
  let before = "";
  return rest.map((end, i) => (before = before.slice(0, shared[i]) + end));
}

/* A module or a tensor. All fields are there from the start, which keeps a hundred thousand of them fast. */
class Node {
  constructor(name, parent) {
    this.name = name;
    this.parent = parent;
    this.kids = [];
    this.index = null; // the kids by name, while the tree is made
    this.tensor = -1;
    this.open = !parent;
    this.level = this.row = this.place = this.size = 0;
    this.bytes = this.count = this.bad = this.changed = 0;
    this.most = this.moved = -1;
  }

  get path() {
    const parts = [];
    for (let node = this; node.parent; node = node.parent) parts.push(node.name);
    return parts.reverse().join(".");
  }

  kid(name) {
    const last = this.kids[this.kids.length - 1];
    if (last?.name === name) return last; // names of one module mostly stand together
    this.index ??= new Map();
    let kid = this.index.get(name);
    if (!kid) {
      kid = new Node(name, this);
      this.index.set(name, kid);
      this.kids.push(kid);
    }
    return kid;
  }
}

function treeOf(names) {
  const root = new Node("", null);
  names.forEach((name, tensor) => {
    let node = root;
    for (const part of name.split(".")) node = node.kid(part);
    node.tensor = tensor;
  });
  const nodes = [root];
  for (let i = 0; i < nodes.length; i++) {
    joined(nodes[i]);
    for (const kid of nodes[i].kids) {
      kid.parent = nodes[i];
      kid.level = nodes[i].level + 1;
      nodes.push(kid);
    }
  }
  return { root, nodes }; // parents before their kids
}

/* A module that holds nothing but another module needs no line of its own. */
function joined(node) {
  node.index = null;
  if (!node.parent || node.tensor >= 0 || node.kids.length !== 1) return;
  const parts = [node.name];
  while (node.tensor < 0 && node.kids.length === 1) {
    const [kid] = node.kids;
    parts.push(kid.name);
    node.tensor = kid.tensor;
    node.kids = kid.kids;
  }
  node.name = parts.join(".");
}

/* Sums of all tensors in a module: bytes (those of another name for the same tensor once), the range, what is not
 * finite, and how far the farthest has moved. */
function summed(nodes, tensors) {
  for (let i = nodes.length - 1; i >= 0; i--) {
    const node = nodes[i];
    if (node.tensor >= 0) add(node, tensors[node.tensor]);
    const above = node.parent;
    if (!above) continue;
    above.bytes += node.bytes;
    above.count += node.count;
    above.bad += node.bad;
    above.changed += node.changed;
    above.most = Math.max(above.most, node.most);
    above.moved = Math.max(above.moved, node.moved);
  }
}

function add(node, tensor) {
  node.count += 1;
  node.bytes += tensor.again ? 0 : tensor.bytes;
  if (tensor.bad) node.bad += 1;
  if (tensor.bins) node.most = Math.max(node.most, Math.abs(tensor.min), Math.abs(tensor.max));
  if (!tensor.change) return;
  node.changed += 1;
  node.moved = Math.max(node.moved, farness(tensor.change));
}

/* By what differences are ordered: the relative one, and before all of them what can't be measured. */
function farness(change) {
  return change.relative === null || change.relative === undefined || change.nans ? Infinity : change.relative;
}

/* The tensors as objects, from the columns of the page. */
function tensorsOf(columns) {
  const names = decoded(columns.names);
  const measured = Boolean(columns.bins);
  const tensors = names.map((name, i) => {
    const [dtype, shape, bytes] = columns.forms[columns.form[i]];
    return {
      name, dtype, shape, bytes, shared: null, again: false, bad: 0, change: null, compared: false, gone: false,
      min: measured ? columns.min[i] : null, max: measured ? columns.max[i] : null, mean: measured ? columns.mean[i] : null,
      std: measured ? columns.std[i] : null, bins: measured ? columns.bins[i] : "",
    };
  });
  for (const [i, owner] of columns.shared) tensors[i].shared = names[owner];
  for (const i of columns.again) tensors[i].again = true;
  for (const [i, count] of columns.bad ?? []) tensors[i].bad = count;
  return tensors;
}
