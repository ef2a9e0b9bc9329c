// The state of the deployment: engines with their KV caches, and what waits.

const PERIOD_MS = 1_000;

export function follow(control, parent) {
  const show = async () => {
    const models = await control.state();
    parent.replaceChildren(
      ...models.map((model) => {
        const part = document.createElement("div");
        const waiting = model.queues.reduce((sum, queue) => sum + queue.requests, 0);
        part.append(`${model.name}: ${model.running} requests running, ${waiting} queued`);
        for (const engine of model.engines) {
          const line = document.createElement("div"), bar = document.createElement("progress");
          bar.value = engine.kv_utilization ?? 0;
          line.append(`${engine.engine_id.split(":")[0]} `, bar);
          line.append(` ${Math.round(100 * (engine.kv_utilization ?? 0))} % of the KV cache in use, ${engine.running ?? 0}`);
          line.append(` sequences run, ${engine.waiting ?? 0} wait`);
          part.append(line);
        }
        return part;
      }),
    );
  };
  setInterval(() => document.hidden || show().catch(() => {}), PERIOD_MS);
}
