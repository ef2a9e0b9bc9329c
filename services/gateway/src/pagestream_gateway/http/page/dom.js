// What changes every second keeps its elements: one that is replaced loses its focus, a selection, and a click whose
// button went down before.

export function setText(element, text) {
  if (element.textContent !== `${text}`) element.textContent = text;
}

// Gives `parent` a child for each key, in this order; `make` makes those that are missing. Returns them by key.
export function keepChildren(parent, keys, make) {
  const known = new Map([...parent.children].map((each) => [each.dataset.key, each]));
  const children = new Map(keys.map((key) => [key, known.get(key) ?? make(key)]));
  for (const [key, child] of known) if (children.get(key) !== child) child.remove();
  let place = parent.firstElementChild;
  for (const [key, child] of children) {
    child.dataset.key = key;
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  return children;
}

// A button that can't be used now keeps its focus, which one that is `disabled` loses.
export function setUsable(button, isUsable) {
  button.setAttribute("aria-disabled", String(!isUsable));
}

export const isUsable = (button) => button.getAttribute("aria-disabled") !== "true";
