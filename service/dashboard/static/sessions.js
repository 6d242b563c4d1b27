// The table of sessions: a page at a time, searched by the server, and what may be done to one.

import * as format from "./format.js";
import { get, post } from "./api.js";
import { bar, byId, element } from "./dom.js";

const PAGE = 12;
const SEARCH_MS = 250; // after the last key
const CONFIRM_MS = 4000;

const view = { offset: 0, search: "", page: null, isActing: false };

export async function loadSessions(now) {
  const query = new URLSearchParams({ search: view.search, offset: view.offset, limit: PAGE });
  view.page = await get(`/dashboard/data/sessions?${query}`);
  const { num_found: found, offset } = view.page;
  if (offset >= found && offset > 0) { // what was here has gone
    view.offset = Math.max(0, Math.floor((found - 1) / PAGE) * PAGE);
    await loadSessions(now);
    return;
  }
  show(now);
}

function show(now) {
  const { num_found: found, num_sessions: total, offset, rows } = view.page;
  const last = Math.min(offset + PAGE, found);
  const range = found ? `${format.count(offset + 1)}–${format.count(last)} of ${format.count(found)}` : "";
  const note = byId("session-count");
  note.textContent = view.search ? `${format.count(found)} of ${format.count(total)} match`
    : `${format.count(total)} sessions`;
  note.dataset.value = total;
  byId("session-range").textContent = range;
  byId("session-prev").disabled = offset === 0;
  byId("session-next").disabled = last >= found;
  byId("session-table").hidden = !rows.length;
  byId("no-sessions").hidden = rows.length > 0;
  byId("no-sessions").textContent = view.search ? "No session matches."
    : "No session yet: a request with the header X-Session-ID begins one.";
  const hasFocus = byId("session-rows").contains(document.activeElement);
  if (view.isActing || hasFocus && document.activeElement.dataset.sure) return;
  const focused = hasFocus ? document.activeElement.getAttribute("aria-label") : null;
  const hasTenants = rows.some((row) => row.tenant !== "default");
  byId("session-rows").replaceChildren(...rows.map((row) => rowOf(row, now, hasTenants)));
  if (focused !== null)
    [...byId("session-rows").querySelectorAll("button")]
      .find((button) => button.getAttribute("aria-label") === focused)?.focus();
}

const cell = (name, ...children) => element("td", { role: "cell", class: name }, ...children);

function rowOf(row, now, hasTenants) {
  const { device, host, disk } = row.residency;
  const held = `${device} of ${row.num_blocks} blocks on the device, ${host} in host memory, ` +
    `${disk} on disk`;
  const whole = Math.max(row.num_blocks, device + host + disk);
  const residency = bar([
    { name: "device", value: device, title: held },
    { name: "host", value: host, title: held },
    { name: "disk", value: disk, title: held },
  ], whole, held);
  const id = element("th", { role: "rowheader", scope: "row", class: "id" }, row.session_id);
  if (hasTenants) id.append(element("span", { class: "tenant" }, row.tenant));
  const share = row.num_blocks ? (device + host + disk) / row.num_blocks : null;
  return element("tr", { role: "row" }, id,
    cell("num", format.count(row.num_tokens)),
    cell("residency", element("div", { class: "beside" }, residency,
      element("span", { class: "num" },
        share === null ? format.NONE : format.percent(Math.min(1, share), 0)))),
    cell("num rate", format.percent(row.hit_rate, 0)),
    cell("num active", format.ago(row.last_active_at, now)),
    cell("actions", ...["fork", "evict", "delete"].map((action) => button(action, row))));
}

function button(action, row) {
  const node = element("button", { type: "button", class: "small",
    "aria-label": `${action} ${row.session_id}` }, action);
  node.addEventListener("click", () => {
    if (action !== "fork" && !node.dataset.sure) {
      node.dataset.sure = "asked";
      node.textContent = "sure?";
      setTimeout(() => {
        delete node.dataset.sure;
        node.textContent = action;
      }, CONFIRM_MS);
      return;
    }
    delete node.dataset.sure;
    act(action, row);
  });
  return node;
}

async function act(action, row) {
  const note = byId("session-note");
  view.isActing = true;
  try {
    const { tenant, session_id: id } = row;
    const response = await post("/dashboard/data/sessions", { action, tenant, session_id: id });
    const done = await response.json();
    note.textContent = action === "fork" ? `forked as ${done.session_id}`
      : action === "evict" ? `${id}: its blocks are being evicted` : `${id} is deleted`;
  } catch (error) {
    note.textContent = error.message;
  } finally {
    view.isActing = false;
  }
  await loadSessions(Date.now() / 1000);
}

/** `reload` loads the page that is wanted now. */
export function startSessions(reload) {
  let timer = 0;
  byId("session-search").addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      [view.search, view.offset] = [event.target.value.trim(), 0];
      reload();
    }, SEARCH_MS);
  });
  byId("session-form").addEventListener("submit", (event) => event.preventDefault());
  for (const [id, step] of [["session-prev", -PAGE], ["session-next", PAGE]])
    byId(id).addEventListener("click", () => {
      view.offset = Math.max(0, view.offset + step);
      reload();
    });
}
