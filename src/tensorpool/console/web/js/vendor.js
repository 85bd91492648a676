// SPDX-License-Identifier: Apache-2.0
// Everything that we use of others: ../vendor has their modules, put there by .ci/web_modules.py.
import htm from "../vendor/htm.js";
import { h } from "../vendor/preact.js";

export { render } from "../vendor/preact.js";
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
export { computed, effect, signal } from "../vendor/signals.js";
export { default as uPlot } from "../vendor/uPlot.js";

export const html = htm.bind(h);
