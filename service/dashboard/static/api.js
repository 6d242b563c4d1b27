// Requests to the server this page came from, with the admin key if it needs one.

const KEY = "headstart-admin-key"; // in this tab's storage, gone when the tab is closed

export class KeyNeeded extends Error {}

export const storedKey = () => sessionStorage.getItem(KEY);
export const storeKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** The response, whatever its status but 401 and 403. */
export async function ask(path, options = {}) {
  const key = storedKey();
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401 || response.status === 403) throw new KeyNeeded();
  return response;
}

export async function get(path) {
  const response = await ask(path);
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

/** A JSON body there and back; an Error with the server's own words if it refuses. */
export async function post(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new Error(await problemOf(response));
  return response;
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}
