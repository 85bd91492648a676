// SPDX-License-Identifier: Apache-2.0
// The views of a StreamWidget: each asks for a picture while it is seen, and for the next when it has drawn one.

const SILENCE_MS = 3000; // without an answer the kernel is busy, or gone
let views = 0;

function element(name, className, parent) {
  const made = document.createElement(name);
  made.className = className;
  parent.append(made);
  return made;
}

function render({ model, el }) {
  const view = `${Date.now()}-${views++}`;
  const root = element("div", "tensorpool-stream", el);
  const bar = element("div", "bar", root);
  const name = element("strong", "", bar);
  const pause = element("button", "", bar);
  const choice = element("select", "", bar);
  const status = element("span", "status", bar);
  const image = element("img", "", root);
  name.textContent = model.get("stream");
  image.alt = `the newest frame of ${model.get("stream")}`;
  choice.title = "colour map of pictures with one channel";
  for (const colormap of model.get("colormaps")) choice.add(new Option(colormap, colormap));

  let isSeen = false;
  let isAsking = false;
  let askedAt = 0;
  let url = "";

  function ask() {
    if (isAsking || !isSeen || document.hidden || model.get("is_paused")) return;
    isAsking = true;
    askedAt = performance.now();
    model.send({ view, width: Math.round((root.clientWidth || 640) * (window.devicePixelRatio || 1)) });
  }

  function show(message, buffers) {
    if (message.view !== view) return;
    isAsking = false;
    if (!buffers?.length) {
      status.textContent = message.text;
      ask();
      return;
    }
    const next = URL.createObjectURL(new Blob([buffers[0]], { type: message.media }));
    image.onload = image.onerror = () => {
      if (url) URL.revokeObjectURL(url);
      url = next;
      requestAnimationFrame(ask);
    };
    image.src = next;
    const time = message.time === null ? "" : `  ${new Date(1000 * message.time).toISOString().slice(11, 23)} UTC`;
    status.textContent = `seq ${message.seq}  ${message.about}  ${message.values}${time}`;
    choice.disabled = message.is_colour;
    root.dataset.seq = message.seq;
  }

  function update() {
    const isPaused = model.get("is_paused");
    pause.textContent = isPaused ? "▶ resume" : "‖ pause";
    pause.setAttribute("aria-pressed", isPaused);
    choice.value = model.get("colormap");
    ask();
  }

  pause.onclick = () => {
    model.set("is_paused", !model.get("is_paused"));
    model.save_changes();
  };
  choice.onchange = () => {
    model.set("colormap", choice.value);
    model.save_changes();
  };
  model.on("change:is_paused", update);
  model.on("change:colormap", update);
  model.on("msg:custom", show);
  const observer = new IntersectionObserver((entries) => {
    isSeen = entries[entries.length - 1].isIntersecting;
    ask();
  });
  observer.observe(root);
  document.addEventListener("visibilitychange", ask);
  const timer = setInterval(() => {
    if (!isAsking || performance.now() - askedAt < SILENCE_MS) return;
    status.textContent = "no answer: the kernel is busy, or has ended";
    isAsking = false;
    ask();
  }, SILENCE_MS);
  update();

  return () => {
    isSeen = false;
    clearInterval(timer);
    observer.disconnect();
    document.removeEventListener("visibilitychange", ask);
    model.off("change:is_paused", update);
    model.off("change:colormap", update);
    model.off("msg:custom", show);
    if (url) URL.revokeObjectURL(url);
  };
}

export default { render };
