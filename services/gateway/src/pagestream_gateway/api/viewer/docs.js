// Shows openapi.json in Swagger UI, with nothing from outside; calls go to the server that the page came from.
"use strict";

const place = document.getElementById("operations");
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", colour);
colour();

(async () => {
  try {
    const answer = await fetch("openapi.json");
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const api = await answer.json();
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
