// What is wrong with the layout of the page as it stands, as short sentences for the one who wrote it.
(limit) => {
  const found = [];
  const say = (text) => { if (!found.includes(text)) found.push(text); };
  const root = document.scrollingElement || document.documentElement;
  const width = document.documentElement.clientWidth;
  const cut = (text, length = 40) => {
    const line = text.trim().replace(/\s+/g, " ");
    return line.length > length ? line.slice(0, length - 1) + "…" : line;
  };
  const name = (el) => {
    const id = el.id ? "#" + el.id : "";
    const kind = !id && el.classList.length ? "." + el.classList[0] : "";
    const text = cut(el.innerText || el.getAttribute("alt") || "", 30);
    return `<${el.tagName.toLowerCase()}${id}${kind}>` + (text ? ` “${text}”` : "");
  };
  const shown = (el) => el.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const all = [...document.body.querySelectorAll("*")].slice(0, 4000).filter(shown);
  const floats = (el) => {
    for (; el && el !== document.body; el = el.parentElement) {
      if (el.tagName === "DIALOG" || ["fixed", "sticky"].includes(getComputedStyle(el).position)) return true;
    }
    return false;
  };
  const scrolledX = (el) => {
    for (let up = el.parentElement; up && up !== document.body; up = up.parentElement) {
      if (getComputedStyle(up).overflowX !== "visible") return true;
    }
    return false;
  };

  if (root.scrollWidth > width + 1) {
    const wide = all.filter((el) => el.getBoundingClientRect().right > width + 1 && !scrolledX(el));
    const inner = wide.filter((el) => !wide.some((other) => other !== el && el.contains(other)));
    const who = inner.slice(0, 3).map(name).join(", ");
    say(`the page is ${root.scrollWidth} px wide and scrolls sideways` + (who ? `; beyond the edge: ${who}` : ""));
  }

  const content = (el) => ["IMG", "SVG", "BUTTON", "INPUT", "SELECT", "TEXTAREA", "CANVAS", "VIDEO", "A"]
    .includes(el.tagName.toUpperCase()) || [...el.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  for (const el of all) {
    if (found.length >= limit) break;
    if (!content(el)) continue;
    const box = el.getBoundingClientRect();
    if (box.width < 2 || box.height < 2) continue;
    const style = getComputedStyle(el);
    // Far away is where a page puts on purpose what screen readers alone are to find.
    const off = box.right < -1500 ? "" : box.right + scrollX <= 0 || box.bottom + scrollY <= 0 ? "left of or above the page"
      : box.left >= width && !scrolledX(el) && root.scrollWidth <= width + 1 ? "right of the page" : "";
    if (off) say(`${name(el)} is ${off} and cannot be seen`);
    const clips = (value) => value === "hidden" || value === "clip";
    const side = clips(style.overflowX) && el.scrollWidth > el.clientWidth + 1;
    const down = clips(style.overflowY) && el.scrollHeight > el.clientHeight + 2;
    if ((side || down) && el.innerText && el.clientWidth > 2 && el.clientHeight > 2) {
      say(`the text of ${name(el)} is clipped: it needs ${el.scrollWidth}x${el.scrollHeight} px, its box has ` +
        `${el.clientWidth}x${el.clientHeight}`);
    }
  }

  const texts = [];
  for (const el of all) {
    if (texts.length >= 400) break;
    if (floats(el)) continue;
    for (const node of el.childNodes) {
      if (node.nodeType !== 3 || !node.data.trim()) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const box of [...range.getClientRects()].slice(0, 20)) {
        if (box.width > 2 && box.height > 2) texts.push({ el, box, text: node.data });
      }
    }
  }
  for (let i = 0; i < texts.length; i++) {
    for (let j = i + 1; j < texts.length && found.length < limit; j++) {
      const a = texts[i], b = texts[j];
      if (a.el === b.el || a.el.contains(b.el) || b.el.contains(a.el)) continue;
      const x = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
      const y = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
      if (x < 3 || y < 3) continue;
      const smaller = Math.min(a.box.width * a.box.height, b.box.width * b.box.height);
      if (x * y > 0.2 * smaller) say(`texts overlap: “${cut(a.text, 30)}” and “${cut(b.text, 30)}”`);
    }
  }
  return found.slice(0, limit);
}
