// Conversations in this browser: {id, turns, revision, updated}, and a summary {id, title, updated} of each for the list.

const STORES = ["conversations", "summaries"];
const TITLE = 60; // characters

/** A string that is kept beside the conversations: for this browser, or with `sessionStorage` for this tab. A browser that
 * keeps nothing, or has no room, forgets it. */
export function kept(name, store = "localStorage") {
  try {
    return window[store].getItem(`penstock.${name}`);
  } catch {
    return null;
  }
}
export function keep(name, value, store = "localStorage") {
  try {
    window[store].setItem(`penstock.${name}`, value);
    return true;
  } catch {
    return false;
  }
}

const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
const committed = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = resolve;
  transaction.onabort = () => reject(transaction.error ?? new Error("the browser gave up"));
});

export function newConversation() {
  const random = crypto.getRandomValues(new Uint32Array(3));
  return { id: [...random].map((part) => part.toString(36)).join(""), turns: [], revision: 0, updated: 0 };
}

export function titleOf(conversation) {
  const first = conversation.turns.find((turn) => turn.role === "user");
  const text = (first?.text || first?.files[0]?.name || "").replace(/\s+/g, " ").trim();
  return (conversation.copy ? "Copy: " : "") + (text.length > TITLE ? `${text.slice(0, TITLE - 1)}…` : text);
}

/** Where conversations are kept. `changed(id)` is called when another tab has written or removed one. */
export class Storage {
  static async open(changed) {
    const opening = indexedDB.open("penstock", 1);
    opening.onupgradeneeded = () => STORES.forEach((name) => opening.result.createObjectStore(name, { keyPath: "id" }));
    const storage = new Storage();
    storage.database = await result(opening);
    storage.database.onversionchange = () => storage.database.close(); // a newer page may change what is kept
    storage.channel = new BroadcastChannel("penstock");
    storage.channel.onmessage = (event) => changed(event.data);
    return storage;
  }

  /** Summaries, the one changed last first. */
  async list() {
    const found = await result(this.database.transaction("summaries").objectStore("summaries").getAll());
    return found.sort((one, other) => other.updated - one.updated);
  }

  read(id) {
    return result(this.database.transaction("conversations").objectStore("conversations").get(id));
  }

  /** Keep a conversation. Where another tab has changed it meanwhile, this one goes on under an id of its own; the answer
   * is whether that was so. A page that is `leaving` has no time to look. Rejects where the browser has no room. */
  async write(conversation, { leaving = false } = {}) {
    const transaction = this.database.transaction(STORES, "readwrite");
    const done = committed(transaction);
    const [conversations, summaries] = STORES.map((name) => transaction.objectStore(name));
    done.catch(() => {}); // told below; a failing look comes first
    const stored = leaving ? undefined : await result(conversations.get(conversation.id));
    const parted = stored !== undefined && stored.revision !== conversation.revision;
    const next = { ...conversation, revision: conversation.revision + 1, ...(parted && { id: newConversation().id, copy: true }) };
    conversations.put(next);
    summaries.put({ id: next.id, title: titleOf(next), updated: next.updated });
    transaction.commit();
    await done;
    Object.assign(conversation, { id: next.id, copy: next.copy, revision: next.revision });
    this.channel.postMessage(next.id);
    return parted;
  }

  async remove(id) {
    const transaction = this.database.transaction(STORES, "readwrite");
    for (const name of STORES) transaction.objectStore(name).delete(id);
    await committed(transaction);
    this.channel.postMessage(id);
  }
}
