// SPDX-License-Identifier: Apache-2.0
// Light, dark, or as the system says: set before the first paint, so that the page never flashes in the other colours.
"use strict";

window.tensorpoolTheme = {
  key: "tensorpool.theme",
  get() {
    try {
      return localStorage.getItem(this.key) || "auto";
    } catch {
      return "auto"; // a browser that keeps nothing
    }
  },
  set(theme) {
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem(this.key, theme);
    } catch {
      // it lasts as long as the page
    }
    window.dispatchEvent(new Event("tensorpool-theme"));
  },
};
document.documentElement.dataset.theme = window.tensorpoolTheme.get();
