// Browsers start no workers for pages that are opened from the disk. There, and only there, the worker that searches
// runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.waiting = [];
      const inner = frame.contentWindow, page = frame.contentDocument;
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data })); // to the page
      this.tell = data => inner.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      script.src = url;
      script.onload = () => { this.ready = true; this.waiting.splice(0).forEach(this.tell); };
      page.body.appendChild(script);
    }
    postMessage(data) { this.ready ? this.tell(data) : this.waiting.push(data); }
    terminate() {}
  };
