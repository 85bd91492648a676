// SPDX-License-Identifier: Apache-2.0
// Requests to the console; an answer that is an error becomes an Error with the server's sentence.
import { useEffect, useState } from "./vendor.js";
import { parse } from "./socket.js";

async function checked(response) {
  if (response.ok) return response;
  let sentence = `the console answered ${response.status}`;
  try {
    sentence = parse(await response.text()).error;
  } catch {
    // not ours: a proxy's page
  }
  const error = new Error(sentence);
  error.status = response.status;
  throw error;
}

export const request = async (path, options) => checked(await fetch(path, options));

export const get = async (path, signal) => parse(await (await request(path, { signal })).text());

export async function send(method, path, body) {
  const response = await request(path, {
    method,
    headers: { "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await response.text();
  return text ? parse(text) : null;
}

// What a path answers, asked for again `everyMs` after each answer while `isOn`: [answer or null, sentence of the last
// failure, again()].
export function usePolled(path, everyMs, isOn = true) {
  const [found, setFound] = useState({ path, data: null, failure: "" });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (!isOn) return undefined;
    const abort = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        const data = await get(path, abort.signal);
        setFound({ path, data, failure: "" });
      } catch (error) {
        if (abort.signal.aborted) return;
        setFound((before) => ({ path, data: before.path === path ? before.data : null, failure: error.message }));
      }
      if (!abort.signal.aborted) timer = setTimeout(ask, everyMs);
    };
    ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [path, everyMs, turn, isOn]);
  const isOfPath = found.path === path;
  return [isOfPath ? found.data : null, isOfPath ? found.failure : "", () => setTurn((count) => count + 1)];
}
