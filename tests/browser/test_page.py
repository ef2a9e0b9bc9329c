"""The page and /docs in a real browser: streams go on through each kill, and each operation can be tried."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from support.redis.servers import skip_for_want_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
SHOTS = os.environ.get("PAGESTREAM_SCREENSHOTS")
"""Folder for screenshots; none are made without it."""
LIMIT_S = 90.0
KILL_IN_TURN = """
const kills = [["engine-0", 20], ["gateway-0", 40], ["redis", 60]];  // at which share of the streams, in percent
const timer = setInterval(() => {
    if (!document.getElementById("phase").textContent.includes("kill")) return;
    const shares = [...document.querySelectorAll("#timeline .lane > span:last-child")].map((each) => each.textContent);
    const mean = shares.reduce((sum, each) => sum + (Number.parseInt(each) || 0), 0) / shares.length;
    const [part, share] = kills[0];
    const button = document.querySelector(`[data-part="${part}"]`);
    if (mean < share || !button || button.ariaDisabled === "true") return;
    button.click();
    kills.shift();
    if (!kills.length) clearInterval(timer);
}, 20)
"""
"""In the page itself: on a busy machine a driver may come too late with its clicks, when the streams have ended."""
PHONE, DESK = 390, 1440
"""Widths of screens, in pixels."""
GATEWAYS = 3
"""Of `serve --demo`; the page asks each until one answers."""

CHAT_OPERATION = "generation-chat_completions_v1_chat_completions_post"
RESPONSES_OPERATION = "responses-create_v1_responses_post"
FILES_OPERATION = "batches-upload_v1_files_post"
FETCH_DOCUMENT = "const done = arguments[0]; fetch('openapi.json').then((it) => it.json()).then(done)"
SHOW_ALL = "for (const each of document.querySelectorAll('[hidden], details')) each.hidden = false, each.open = true"
NUM_POLLS = "return performance.getEntriesByType('resource').filter((it) => it.name.endsWith('/processes')).length"

pytestmark = pytest.mark.timeout(300)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """Run `pagestream serve --demo`; yield the page's address with its token."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--data-dir", str(folder / "data"), "--dtype", "float32"]
    command = [sys.executable, "-m", "pagestream_cli", "serve", "--demo", *ports, *options]
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True)
        try:
            for line in _lines(folder / "said", process):
                if (found := re.search(r"page: (\S+)", line)) is not None:
                    yield found[1]
                    break
        finally:
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve without keys."""
    with serving(tmp_path_factory.mktemp("page")) as address:
        yield address


def _lines(file: Path, process: subprocess.Popen[bytes]) -> Iterator[str]:
    with file.open() as reader:
        while process.poll() is None:
            yield reader.readline()
    raise RuntimeError(file.read_text())


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """Open Chromium, without anything outside this machine."""
    if not (CHROMIUM and DRIVER):
        skip_for_want_of("chromium", "there is no Chromium with its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,1150"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def shot(browser: webdriver.Chrome, name: str) -> None:
    if SHOTS:
        browser.save_screenshot(str(Path(SHOTS) / f"{name}.png"))


def shot_in_both_schemes(browser: webdriver.Chrome, name: str) -> None:
    """Take a screenshot in light colours, then one in dark ones."""
    if SHOTS:
        for scheme in ("dark", "light"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            WebDriverWait(browser, LIMIT_S).until(lambda it: text(it, "state"))
            shot(browser, f"{name}-{scheme}")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@contextmanager
def screen(browser: webdriver.Chrome, width: int, height: int = 900) -> Iterator[None]:
    """Give the page a screen of this size: a phone's, or a desk's."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < PHONE + 1}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def check_widths(browser: webdriver.Chrome, place: str) -> None:
    """Check that neither the page nor an element of it is wider than a phone or a desk's screen."""
    for width, height in ((PHONE, 1250), (DESK, 1150)):
        with screen(browser, width, height):
            browser.execute_script("scrollTo(0, 0)")
            shot(browser, f"streams-{width}")
            box = browser.find_element(By.ID, place).rect
            assert widest(browser) <= width
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width


def widest(browser: webdriver.Chrome) -> int:
    """Return how wide the page is, in pixels."""
    width: int = browser.execute_script("return document.documentElement.scrollWidth")
    return width


def text(browser: webdriver.Chrome, place: str) -> str:
    return str(browser.find_element(By.ID, place).text)


def open_page(browser: webdriver.Chrome, address: str) -> WebDriverWait[webdriver.Chrome]:
    browser.get(address)
    waiting = WebDriverWait(browser, LIMIT_S, poll_frequency=0.1)
    waiting.until(lambda it: it.find_element(By.TAG_NAME, "body").get_attribute("data-ready") == "true")
    return waiting


def test_streams_survive_each_kill_on_the_page(browser: webdriver.Chrome, address: str) -> None:
    waiting = open_page(browser, address)
    assert "#" not in browser.current_url  # the token is no part of what is copied
    browser.execute_script("document.getElementById('tokens').value = 400")
    browser.execute_script(KILL_IN_TURN)
    browser.find_element(By.ID, "run").click()
    waiting.until(lambda it: shown(it)["requests"] == 8)
    assert shown(browser)["shared"] > 0, "the streams begin alike"
    waiting.until(lambda it: "kill" in text(it, "phase"))
    waiting.until(lambda it: shown(it)["requests"] == 8 and shown(it)["cached"] > 0)
    waiting.until(lambda it: list(held(it)) == ["engine-1"] and held(it)["engine-1"] > 0)
    shot_in_both_schemes(browser, "streams-running")
    waiting.until(lambda it: text(it, "verdict"))
    waiting.until(lambda it: list(held(it)) == ["engine-0", "engine-1"])
    shot(browser, "streams")
    check_widths(browser, "verdict")
    assert tiles(browser) == ["Throughput", "Batch", "Queue"]
    assert text(browser, "verdict") == (
        "8 of 8 streams are identical to the undisturbed ones; killed: engine-0, gateway-0, redis"
    )
    rows = browser.find_elements(By.CSS_SELECTOR, "#results tbody tr")
    assert len({row.find_elements(By.TAG_NAME, "td")[5].text for row in rows}) == 8
    assert max(int(row.find_elements(By.TAG_NAME, "td")[2].text) for row in rows) >= 2
    check_slow_click(browser, waiting, "engine-1")


def check_slow_click(browser: webdriver.Chrome, waiting: WebDriverWait[webdriver.Chrome], part: str) -> None:
    """Hold a button while the page asks three times for what runs: the kill is made, and the button keeps its focus."""
    button = browser.find_element(By.CSS_SELECTOR, f"[data-part={part}]")
    before = text(browser, "killed")
    browser.execute_script("performance.clearResourceTimings()")
    ActionChains(browser).move_to_element(button).click_and_hold().perform()
    waiting.until(lambda it: it.execute_script(NUM_POLLS) >= 3)
    ActionChains(browser).release().perform()
    waiting.until(lambda it: text(it, "killed") not in ("", before))
    assert text(browser, "killed").startswith(f"{part} (process ")
    assert button.get_attribute("aria-disabled") == "true"
    waiting.until(lambda _: button.get_attribute("aria-disabled") == "false")  # it was started again
    assert browser.switch_to.active_element == button
    assert str(button.get_attribute("aria-label")).startswith(f"kill -9 {part}, restarted ")


def test_a_conversation_and_a_used_token(browser: webdriver.Chrome, address: str) -> None:
    waiting = open_page(browser, address)
    assert "token was used" in text(browser, "trouble")
    waiting = open_page(browser, address.partition("#")[0])
    assert not text(browser, "trouble")
    assert browser.find_element(By.ID, "kills").get_attribute("hidden")
    waiting.until(lambda it: Select(it.find_element(By.ID, "model")).options)
    browser.find_element(By.ID, "prompt").send_keys("Who lives in the lighthouse?")
    browser.find_element(By.ID, "send").click()
    waiting.until(lambda it: it.find_elements(By.CSS_SELECTOR, ".assistant .note"))
    answer = browser.find_elements(By.CSS_SELECTOR, ".assistant")[0].text
    assert answer.startswith("Mara lives in the lighthouse.")
    shot(browser, "chat")
    wrong = [each for each in browser.get_log("browser") if "Content Security" in each["message"]]
    assert not wrong


def test_what_is_read_out(browser: webdriver.Chrome, address: str) -> None:
    """What changes by itself is announced; each control has a name."""
    open_page(browser, address.partition("#")[0])
    roles = {"trouble": "alert", "messages": "log", "phase": "status", "verdict": "status", "killed": "status"}
    assert {name: browser.find_element(By.ID, name).aria_role for name in ("messages",)} == {"messages": "log"}
    assert {name: browser.find_element(By.ID, name).get_attribute("role") for name in roles} == roles
    browser.execute_script(SHOW_ALL)
    controls = browser.find_elements(By.CSS_SELECTOR, "button, input, select, textarea, canvas, a")
    assert len(controls) > 10
    assert not [each.get_attribute("outerHTML") for each in controls if not each.accessible_name]


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_docs_show_each_operation_and_try_it(
    browser: webdriver.Chrome, address: str, width: int, tmp_path: Path
) -> None:
    with screen(browser, width, 1200):
        browser.get(address.partition("#")[0] + "docs")
        waiting = WebDriverWait(browser, LIMIT_S, poll_frequency=0.1)
        waiting.until(lambda it: "/v1/chat/completions" in text(it, "operations"))
        shot(browser, f"docs-{width}")
        document = browser.execute_async_script(FETCH_DOCUMENT)
        num_operations = sum(len(each) for each in document["paths"].values())
        blocks = browser.find_elements(By.CSS_SELECTOR, "#operations .opblock")
        assert len(blocks) == num_operations
        chat = browser.find_element(By.CSS_SELECTOR, f"#operations-{CHAT_OPERATION}")
        chat.find_element(By.CSS_SELECTOR, ".opblock-summary-control").click()
        waiting.until(lambda it: chat.find_elements(By.CSS_SELECTOR, "button.execute"))
        examples = Select(chat.find_element(By.CSS_SELECTOR, ".examples-select select"))
        assert [each.text for each in examples.options][:2] == ["A question", "A stream"]
        chat.find_element(By.CSS_SELECTOR, "button.execute").click()
        waiting.until(lambda it: "Mara lives in the lighthouse." in chat.text)
        browser.execute_script("arguments[0].scrollIntoView()", chat)
        shot(browser, f"docs-{width}-answer")
        assert widest(browser) <= width
        upload(browser, waiting, tmp_path / "jobs.jsonl")
        made = browser.find_element(By.CSS_SELECTOR, f"#operations-{RESPONSES_OPERATION}")
        made.find_element(By.CSS_SELECTOR, ".opblock-summary-control").click()
        waiting.until(lambda _: made.find_elements(By.CSS_SELECTOR, "button.execute"))
        assert '"model": "demo"' in str(made.find_element(By.TAG_NAME, "textarea").get_attribute("value"))
    assert not browser.get_log("browser"), "nothing is fetched from outside, and nothing breaks the policy"


def upload(browser: webdriver.Chrome, waiting: WebDriverWait[webdriver.Chrome], jobs: Path) -> None:
    """Upload a file by the form of its operation, as it is filled in at first."""
    jobs.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A"}}\n')
    files = browser.find_element(By.CSS_SELECTOR, f"#operations-{FILES_OPERATION}")
    files.find_element(By.CSS_SELECTOR, ".opblock-summary-control").click()
    waiting.until(lambda _: files.find_elements(By.CSS_SELECTOR, "input[type=file]"))
    files.find_element(By.CSS_SELECTOR, "input[type=file]").send_keys(str(jobs))
    files.find_element(By.CSS_SELECTOR, "button.execute").click()
    waiting.until(lambda _: '"filename": "jobs.jsonl"' in files.text)


def test_with_keys_nothing_shows_until_one_is_given(browser: webdriver.Chrome, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(b'secret').hexdigest()} -> somebody\n")
    with serving(tmp_path, "--api-keys", str(keys)) as address:
        waiting = open_page(browser, address)
        assert "a key or token is needed" in text(browser, "trouble")
        waiting.until(lambda it: _asked(it) == GATEWAYS)
        browser.find_element(By.ID, "key").send_keys("wrong", Keys.TAB)
        waiting.until(lambda it: _asked(it) == 2 * GATEWAYS)
        browser.execute_async_script("setTimeout(arguments[0], 2500)")  # two of the page's periods
        assert _asked(browser) == 2 * GATEWAYS, "a key that was refused is not tried again"
        assert not browser.find_element(By.ID, "live").is_displayed()
        field = browser.find_element(By.ID, "key")
        field.clear()
        field.send_keys("secret", Keys.TAB)
        waiting.until(lambda it: list(held(it)) == ["engine-0", "engine-1"])
        assert not text(browser, "trouble")
        assert browser.find_element(By.ID, "live").is_displayed()


def _asked(browser: webdriver.Chrome) -> int:
    """Return how often the page has asked a gateway for what runs."""
    script = (
        """return performance.getEntriesByType("resource").filter((each) => each.name.endsWith("/page/state")).length"""
    )
    found: int = browser.execute_script(script)
    return found


def held(browser: webdriver.Chrome) -> dict[str, int]:
    """Return the held blocks by the name of each engine that answers."""
    script = """return Object.fromEntries([...document.querySelectorAll("#live .engine:not(.silent)")]
        .map((each) => [each.querySelector("b").textContent, Number(each.querySelector("canvas").dataset.held)]))"""
    found: dict[str, int] = browser.execute_script(script)
    return found


def shown(browser: webdriver.Chrome) -> dict[str, int]:
    """Return what the pictures of all engines have together, in figures."""
    script = """const figures = {requests: 0, shared: 0, cached: 0};
        for (const { dataset } of document.querySelectorAll("#live .engine:not(.silent) canvas"))
            for (const name in figures) figures[name] += Number(dataset[name] ?? 0);
        return figures;"""
    found: dict[str, int] = browser.execute_script(script)
    return found


def tiles(browser: webdriver.Chrome) -> list[str]:
    """Return the names of the figures; in one script, since the page draws them anew all the time."""
    script = """return [...document.querySelectorAll("#live .tile")].map((each) => each.innerText.split("\\n")[0])"""
    found: list[str] = browser.execute_script(script)
    return found
