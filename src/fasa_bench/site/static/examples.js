// Browses the examples of one run; each run's rows come from a script of their own, loaded when it is chosen.
"use strict";

(() => {
  const pick = document.getElementById("pick");
  if (!pick) return;
  const narrow = document.getElementById("narrow"), list = document.getElementById("rows"), pager = document.querySelector(".pager");
  const SIZE = 25, cache = new Map();
  let rows = [], page = 0;

  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;  // never as HTML: predictions may hold some
    if (className) made.className = className;
    return made;
  };
  const score = row => Object.values(row.scores ?? {})[0];
  const digits = value => Number.isInteger(value) ? String(value) : value.toPrecision(4);

  report.rows = (id, found) => { cache.set(id, found); if (pick.elements.run.value === id) show(id); };

  const load = id => {
    if (cache.has(id)) return show(id);
    list.replaceChildren(element("p", "Loading…"));
    const script = document.createElement("script");
    script.src = `data/rows-${id}.js`;
    script.onerror = () => list.replaceChildren(element("p", "The rows of this run are not there.", "note"));
    document.head.append(script);
    return undefined;
  };

  const show = id => {
    rows = cache.get(id);
    const groups = [...new Set(rows.map(row => row.group).filter(Boolean))].sort();
    narrow.elements.group.replaceChildren(...["", ...groups].map(name => { const option = element("option", name || "all"); option.value = name; return option; }));
    narrow.elements.group.disabled = groups.length < 2;
    const bare = rows.filter(row => row.texts === false).length;
    const about = document.getElementById("about");
    about.replaceChildren(`${rows.length} examples`);
    if (bare) about.append(`; ${bare === rows.length ? "this run was" : `${bare} were`} stored without texts (store_text=false, or the task has none)`);
    about.append(". ");
    const link = element("a", "The run among the others");
    link.href = `runs.html#run-${id}`;
    about.append(link);
    page = 0;
    draw();
  };

  const chosen = () => {
    const group = narrow.elements.group.value, order = narrow.elements.order.value;
    const words = narrow.elements.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter(row => (!group || row.group === group) && (!words.length || (() => {
      const text = [row.id, row.head, row.tail, row.error, ...(row.prediction ?? []), ...(row.reference ?? [])].join("\n").toLowerCase();
      return words.every(word => text.includes(word));
    })()));
    if (!order) return found;
    const sign = order === "low" ? 1 : -1;
    return found.map((row, index) => [score(row), index, row])
      .sort((a, b) => (a[0] === undefined) - (b[0] === undefined) || sign * (a[0] - b[0]) || a[1] - b[1]).map(item => item[2]);
  };

  const part = (into, name, texts, empty) => {
    if (texts === undefined) return;
    into.append(element("dt", name));
    for (const text of texts) {
      const value = element("dd");
      value.append(text === "" ? element("em", empty) : element("pre", text));
      into.append(value);
    }
  };

  const card = row => {
    const made = element("article", undefined, "example");
    made.append(element("h2", row.id));
    const facts = element("p", undefined, "facts-line");
    const add = (name, value) => { const item = element("span"); item.append(`${name} `, element("strong", value)); facts.append(item); };
    for (const [name, value] of Object.entries(row.scores ?? {})) add(name, digits(value));
    if (row.tokens !== undefined) add("prompt tokens", row.tokens.toLocaleString("en"));
    if (row.generated !== undefined) add("answer tokens", [row.generated].flat().join(", "));
    if (row.finish !== undefined) add("ended by", [...new Set([row.finish].flat())].join(", "));
    made.append(facts);
    if (row.error) made.append(element("p", `Failed: ${row.error}`, "note"));
    const texts = element("dl");
    if (row.head !== undefined) part(texts, "Prompt, beginning", [row.head], "empty");
    if (row.tail !== undefined) part(texts, "Prompt, end", [row.tail], "empty");
    part(texts, row.prediction?.length > 1 ? "Predictions" : "Prediction", row.prediction, "nothing was generated");
    part(texts, row.reference?.length > 1 ? "References, any of which counts" : "Reference", row.reference, "empty");
    if (texts.children.length) made.append(texts);
    else if (row.texts === false) made.append(element("p", "No texts stored.", "hint"));
    return made;
  };

  const draw = () => {
    const found = chosen(), pages = Math.max(1, Math.ceil(found.length / SIZE));
    page = Math.min(Math.max(page, 0), pages - 1);
    list.replaceChildren(...found.slice(page * SIZE, (page + 1) * SIZE).map(card));
    narrow.querySelector("output").textContent = `${found.length} of ${rows.length} examples`;
    pager.hidden = pages < 2;
    pager.querySelector("span").textContent = `page ${page + 1} of ${pages}`;
    const [back, on] = pager.querySelectorAll("button");
    back.disabled = page === 0;
    on.disabled = page === pages - 1;
  };

  const offer = () => {  // only runs of the chosen model, task and method
    const given = ["model", "task", "method"].map(name => [name, pick.elements[name].value]).filter(pair => pair[1]);
    const options = [...pick.elements.run.options];
    options.forEach(option => { option.hidden = option.disabled = !given.every(([name, value]) => option.dataset[name] === value); });
    if (pick.elements.run.selectedOptions[0]?.disabled ?? true) {
      const first = options.find(option => !option.disabled);
      if (!first) { list.replaceChildren(element("p", "No run has all of these.", "note")); return; }
      pick.elements.run.value = first.value;
    }
    load(pick.elements.run.value);
  };

  const follow = () => {
    const id = decodeURIComponent(location.hash.slice(1));
    if ([...pick.elements.run.options].some(option => option.value === id)) {
      ["model", "task", "method"].forEach(name => { pick.elements[name].value = ""; });
      pick.elements.run.value = id;
    }
    offer();
  };

  pick.addEventListener("input", event => {
    offer();
    if (event.target.name === "run") history.replaceState(null, "", `#${pick.elements.run.value}`);
  });
  narrow.addEventListener("input", () => { page = 0; draw(); });
  for (const form of [pick, narrow]) { form.addEventListener("submit", event => event.preventDefault()); form.hidden = false; }
  pager.addEventListener("click", event => {
    const step = Number(event.target.dataset?.step ?? 0);
    if (step) { page += step; draw(); narrow.scrollIntoView(); }
  });
  addEventListener("hashchange", follow);
  follow();
})();
