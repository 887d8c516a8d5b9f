// Browsers start no Worker for a page that is read from disk: there the search runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (src) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.onload = () => done();
        script.onerror = () => failed(new Error(`${src} can not be loaded`));
        script.src = new URL(src, location.href).href;
        inside.document.body.append(script);
      });
      inside.importScripts = (...sources) => sources.reduce((before, src) => before.then(() => load(src)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside = inside;
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
