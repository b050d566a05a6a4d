"use strict";
// Tables that sort and are searched, the state of which is in the address; charts that are drawn when they are seen.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = new URLSearchParams();

  // What an address says: "#q=layer&sort=workload.2.down"; without "=" it is the name of a section.
  function fromAddress() {
    const text = location.hash.slice(1);
    for (const name of [...state.keys()]) state.delete(name);
    if (text.includes("=")) new URLSearchParams(text).forEach((value, name) => state.set(name, value));
  }
  function toAddress() {
    const text = state.toString();
    history.replaceState(null, "", text ? "#" + text : location.pathname + location.search);
  }

  // Tables ----------------------------------------------------------------------------------------
  function key(row, column) {
    const cell = row.cells[column];
    return cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent.trim();
  }
  function compare(a, b) {
    const texts = (typeof a === "string") - (typeof b === "string");
    if (texts) return texts; // numbers before what has none, such as a dash
    return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
  }
  function sort(table, column, down) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row, place) => ({ row, place, key: key(row, column) }));
    rows.sort((a, b) => {
      const empty = (typeof a.key === "string") - (typeof b.key === "string");
      return empty || (down ? compare(b.key, a.key) : compare(a.key, b.key)) || a.place - b.place;
    });
    body.append(...rows.map((item) => item.row));
    [...table.tHead.rows[0].cells].forEach((head, k) => {
      if (k === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }
  function prepare(table) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        const down = before ? before === "ascending" : head.classList.contains("number");
        sort(table, column, down);
        if (!table.dataset.name) return;
        state.set("sort", [table.dataset.name, column, down ? "down" : "up"].join("."));
        toAddress();
      });
    });
  }
  function search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of document.querySelectorAll("table.sortable[data-name] tbody tr")) {
      row.dataset.text ??= row.textContent.toLowerCase();
      row.hidden = !words.every((word) => row.dataset.text.includes(word));
      shown += !row.hidden;
    }
    document.getElementById("nothing").hidden = shown > 0;
  }
  function restore() {
    fromAddress();
    const field = document.getElementById("find");
    if (!field) return;
    field.value = state.get("q") || "";
    search(field.value);
    const [name, column, way] = (state.get("sort") || "").split(".");
    const table = [...document.querySelectorAll("table.sortable[data-name]")].find((t) => t.dataset.name === name);
    if (table && table.tHead.rows[0].cells[column]) sort(table, Number(column), way === "down");
  }

  // Charts ----------------------------------------------------------------------------------------
  function filled(part) {
    const all = window.autotuneData || {};
    if (part.data && part.data.name && all[part.data.name]) part.data.values = all[part.data.name];
    (part.layer || []).forEach(filled);
    return part;
  }
  async function draw(place) {
    place.dataset.drawn = dark.matches ? "dark" : "light";
    const chart = filled(JSON.parse(place.querySelector("script").textContent));
    let drawing = place.querySelector(".drawing");
    if (!drawing) {
      drawing = document.createElement("div");
      drawing.className = "drawing";
      place.append(drawing);
    }
    const fits = !chart.width;
    const whole = {
      ...chart,
      ...(fits ? { width: "container", autosize: { type: "fit-x", contains: "padding" } } : {}),
      config: { ...window.autotuneThemes[place.dataset.drawn], ...chart.config },
    };
    const actions = { export: true, source: false, compiled: false, editor: false };
    try {
      await vegaEmbed(drawing, whole, {
        mode: "vega-lite", renderer: "svg", actions, tooltip: { theme: place.dataset.drawn },
      });
    } catch (error) {
      drawing.className = "wrong";
      drawing.textContent = "This chart cannot be drawn: " + error.message;
      console.error(error);
    }
  }
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });

  document.querySelectorAll("table.sortable").forEach(prepare);
  document.querySelectorAll(".chart").forEach((place) => seen.observe(place));
  dark.addEventListener("change", () => document.querySelectorAll(".chart[data-drawn]").forEach(draw));
  const field = document.getElementById("find");
  if (field) {
    field.addEventListener("input", () => {
      search(field.value);
      if (field.value) state.set("q", field.value); else state.delete("q");
      toAddress();
    });
  }
  addEventListener("hashchange", restore);
  restore();
})();
