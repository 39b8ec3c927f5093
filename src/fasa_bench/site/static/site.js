// Theme, sorting and filters. Every page can be read without it.
"use strict";

window.report = { rows() {} };

(() => {
  const root = document.documentElement;

  // --- theme
  const button = document.querySelector("button.theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} theme`); };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* lasts for this page only */ }
    label();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();
  button.hidden = false;

  // --- sorting
  const key = cell => {
    const given = cell?.dataset.sort;
    const text = given ?? cell?.textContent.trim() ?? "";
    const number = text === "" ? NaN : Number(text);
    return { text, number, absent: cell?.classList.contains("num") && Number.isNaN(number) };
  };
  const compare = (a, b, sign) => {
    if (a.absent || b.absent) return (a.absent ? 1 : 0) - (b.absent ? 1 : 0);  // what is not there stays last
    const both = !Number.isNaN(a.number) && !Number.isNaN(b.number);
    return sign * (both ? a.number - b.number : a.text.localeCompare(b.text, "en", { numeric: true }));
  };
  const sortable = table => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const press = document.createElement("button");
      press.type = "button";
      press.className = "sort";
      press.append(...head.childNodes);
      head.append(press);
      press.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach(other => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map(row => [key(row.cells[column]), row]);
        rows.sort((a, b) => compare(a[0], b[0], up ? 1 : -1));
        body.append(...rows.map(pair => pair[1]));
      });
    });
  };
  document.querySelectorAll("table[data-sortable]").forEach(sortable);

  // --- filters: a form narrows all elements of the page that have its keys
  const filter = form => {
    const given = [...form.elements].filter(field => field.name && field.name !== "search" && field.value);
    const words = (form.elements.search?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0, total = 0;
    document.querySelectorAll("[data-row]").forEach(row => {
      const counts = row.tagName === "TR";
      const fits = given.every(field => !(field.name in row.dataset) || row.dataset[field.name] === field.value)
        && (!counts || words.every(word => row.textContent.toLowerCase().includes(word)));
      row.hidden = !fits;
      if (counts) { total += 1; shown += fits ? 1 : 0; }
    });
    form.querySelector("output").textContent = `${shown} of ${total} rows`;
    form.dispatchEvent(new CustomEvent("filtered", { bubbles: true }));
  };
  document.querySelectorAll("form[data-filters]").forEach(form => {
    form.addEventListener("input", () => filter(form));
    form.addEventListener("submit", event => event.preventDefault());
    form.hidden = false;
    if (form.querySelector("[name]:not([value=''])")) filter(form);
  });

  // --- a link to a row that a filter hides, or in a closed part, opens it
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target) { target.hidden = false; target.closest("details")?.setAttribute("open", ""); target.scrollIntoView({ block: "center" }); }
  };
  addEventListener("hashchange", reveal);
  if (document.querySelector("tr[id]")) reveal();
})();
