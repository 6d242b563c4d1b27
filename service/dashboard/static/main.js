// Asks the server again and again and shows what it says. All figures are the server's own.

import { forgetKey, get, KeyNeeded, storeKey, storedKey } from "./api.js";
import { setModel, startChat } from "./chat.js";
import { byId } from "./dom.js";
import { loadHistory, setTiers, startHistory } from "./history.js";
import { showOverview, showState } from "./overview.js";
import { showFindings, startFindings } from "./findings.js";
import { showRequests } from "./requests.js";
import { loadSessions, startSessions } from "./sessions.js";

const POLL_MS = 1000;
const HIDDEN_MS = 10_000; // while nobody sees the page
const EVERY = { requests: 2, findings: 10, sessions: 5 }; // polls

const clock = { ahead: 0 }; // the server's, by ours: its times are compared with its own
const visible = new Set();
let [polls, timer] = [0, 0];
let isWaitingForKey = false;

const now = () => Date.now() / 1000 + clock.ahead;

async function poll() {
  const data = await get("/dashboard/data");
  clock.ahead = data.at - Date.now() / 1000;
  showOverview(data);
  setModel(data.ready ? data.models : []);
  setTiers(data.memory.map((tier) => tier.tier));
  const due = (name) => visible.has(name) && polls % EVERY[name] === 0;
  const parts = [loadHistory(now())];
  if (due("requests") || polls < 2)
    parts.push(get("/dashboard/data/requests?limit=12").then((body) => showRequests(body, now())));
  if (due("findings") || polls < 2)
    parts.push(get("/dashboard/data/findings").then((body) => showFindings(body, now())));
  if (due("sessions") || polls < 2) parts.push(loadSessions(now()));
  await Promise.all(parts);
  polls += 1;
  byId("board").classList.remove("stale");
  byId("board").setAttribute("aria-busy", "false");
}

async function live() {
  clearTimeout(timer);
  try {
    await poll();
    byId("key-form").hidden = true;
    byId("board").hidden = false;
    isWaitingForKey = false;
  } catch (error) {
    if (error instanceof KeyNeeded) {
      askForKey();
      return; // goes on when a key is entered
    }
    showState("offline", "no connection to the server");
    byId("board").classList.add("stale");
  }
  timer = setTimeout(live, document.hidden ? HIDDEN_MS : POLL_MS);
}

function askForKey() {
  const wasGiven = storedKey() !== null;
  forgetKey();
  isWaitingForKey = true;
  byId("key-form").hidden = false;
  byId("board").hidden = true;
  showState("locked", wasGiven ? "this key does not open the dashboard" : "an admin key is needed");
}

/** At once, for what somebody has just asked for; a failure is the next poll's to say. */
function reload(load) {
  if (!isWaitingForKey) load(now()).catch(() => {});
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key").value.trim());
  byId("key").value = "";
  live();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !isWaitingForKey) live();
});
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries)
    if (isIntersecting) visible.add(target.dataset.part);
    else visible.delete(target.dataset.part);
}, { rootMargin: "200px" });
for (const section of document.querySelectorAll("[data-part]")) watcher.observe(section);

startHistory(() => reload(loadHistory));
startFindings();
startSessions(() => reload(loadSessions));
startChat();
live();
