// SPDX-License-Identifier: Apache-2.0
// Which view is shown: the fragment of the address, such as #/streams/10001.
import { computed, signal } from "./vendor.js";

const fragment = signal(location.hash);

addEventListener("hashchange", () => {
  fragment.value = location.hash;
  scrollTo(0, 0);
});

// ["streams", "10001"]: the parts, decoded.
export const route = computed(() => {
  const parts = fragment.value.replace(/^#\/?/, "").split("/").filter(Boolean);
  try {
    return parts.map(decodeURIComponent);
  } catch {
    return [];
  }
});

export const hrefOf = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

export function go(...parts) {
  location.hash = hrefOf(...parts);
}
