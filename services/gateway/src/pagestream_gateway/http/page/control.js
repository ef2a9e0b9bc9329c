// The control of `pagestream serve --demo`: which processes there are, which engine has which stream, and kill -9.

export class Control {
  constructor(url, session) {
    this.url = url;
    this.session = session;
  }

  // The fragment of the address has the port and a token, which is good for one session.
  static async open() {
    const found = /^#demo=(\d+)\.([\w-]+)$/.exec(location.hash);
    const kept = JSON.parse(sessionStorage.getItem("control") ?? "null");
    if (!found) return kept && new Control(kept.url, kept.session);
    history.replaceState(null, "", location.pathname); // a token is no part of what is copied
    const url = `http://127.0.0.1:${found[1]}`;
    const answer = await fetch(`${url}/session`, { method: "POST", body: JSON.stringify({ token: found[2] }) });
    if (!answer.ok) throw new Error("the control's token was used before: it is good for one page");
    const { session } = await answer.json();
    sessionStorage.setItem("control", JSON.stringify({ url, session }));
    return new Control(url, session);
  }

  async call(method, path, body) {
    const answer = await fetch(this.url + path, {
      method, headers: { Authorization: `Bearer ${this.session}` }, body: body && JSON.stringify(body),
    });
    if (!answer.ok) throw new Error(`the control answered ${answer.status}`);
    return answer.json();
  }

  processes() {
    return this.call("GET", "/processes");
  }

  kill(part) {
    return this.call("POST", "/kill", { part });
  }

  async owners(ids) {
    return (await this.call("POST", "/owners", { ids })).owners;
  }
}
