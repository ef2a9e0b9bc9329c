// Shows openapi.json in Swagger UI, with nothing from outside; calls go to the server that the page came from.
"use strict";

const place = document.getElementById("operations");
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", colour);
colour();

const ANY_MODEL = "my-model"; // see examples.py

// Puts a model that is served into the examples, where that can be asked without a key: each refusal is audited.
async function nameModel(api) {
  if (place.dataset.asksForKeys === "true") return;
  const answer = await fetch("v1/models").catch(() => null);
  const [first] = answer?.ok ? (await answer.json()).data : [];
  if (!first) return;
  for (const operations of Object.values(api.paths))
    for (const { requestBody } of Object.values(operations))
      for (const { value } of Object.values(requestBody?.content["application/json"]?.examples ?? {}))
        if (value.model === ANY_MODEL) value.model = first.id;
}

(async () => {
  try {
    const answer = await fetch("openapi.json");
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const api = await answer.json();
    await nameModel(api);
    // Behind a proxy that adds a prefix the API is beside this page, not at the server's root.
    api.servers = [{ url: new URL(".", location.href).href.replace(/\/$/, "") }];
    SwaggerUIBundle({
      spec: api,
      domNode: place,
      deepLinking: true,
      defaultModelsExpandDepth: 0,
      displayRequestDuration: true,
      docExpansion: "list",
      filter: true,
      tryItOutEnabled: true,
      validatorUrl: null,
      onComplete: () => place.removeAttribute("aria-busy"),
    });
  } catch (error) {
    place.textContent = `openapi.json could not be read: ${error.message}`;
    place.className = "failed";
    place.removeAttribute("aria-busy");
  }
})();
