//! The report's page in a real browser: it loads, and the browser has nothing to complain of.

#[path = "../../lb-user/src/view/fixture.rs"]
pub mod fixture;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, ensure};
use fixture::Fixture;
use lb_tests::{
    agent::binary,
    runner::{self, skip, test},
};
use lb_user::view::{Answer, Answers, Document, ServiceFilter};

fn main() -> ExitCode {
    runner::run(vec![test(
        "a_browser_opens_the_page_without_a_complaint",
        a_browser_opens_the_page,
    )])
}

fn a_browser_opens_the_page() -> Result<()> {
    let browser = browser().ok_or_else(|| skip("no chromium on PATH"))?;
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let report = Fixture { ready: true }.report(&ServiceFilter::default())?;
    let document = Document::from(Answer::Report(Box::new(report)));
    fs::write(at("report.json"), serde_json::to_vec(&document)?)?;
    let written = Command::new(binary())
        .args(["report", "--from"])
        .arg(at("report.json"))
        .arg("--html")
        .arg(at("report.html"))
        .output()
        .context("run evenkeel")?;
    ensure!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));

    let (dom, complaints) = open(&browser, folder.path(), "report.html")?;
    ensure!(complaints.is_empty(), "the browser complains: {complaints:#?}");
    for wanted in ["shop/web: one endpoint is starved", "1 = chance", "STARVED"] {
        ensure!(dom.contains(wanted), "`{wanted}` is not in the page:\n{dom}");
    }

    // That complaints are found at all: a page that asks for what its policy forbids.
    let page = fs::read_to_string(at("report.html"))?;
    let broken = page.replace("</main>", "<img src=\"file:///nowhere.png\" alt=\"\"/></main>");
    ensure!(broken != page, "the page has no main part");
    fs::write(at("broken.html"), broken)?;
    let (_, complaints) = open(&browser, folder.path(), "broken.html")?;
    ensure!(
        !complaints.is_empty(),
        "a page that breaks its policy raises no complaint"
    );
    Ok(())
}

/// The browser, where there is one.
fn browser() -> Option<PathBuf> {
    let folders = env::var_os("PATH")?;
    let mut names =
        env::split_paths(&folders).flat_map(|folder| ["chromium", "chromium-browser"].map(|name| folder.join(name)));
    names.find(|path| path.is_file())
}

/// Loads a page of a folder: the document as the browser has it, and what it logged of it.
fn open(browser: &Path, folder: &Path, page: &str) -> Result<(String, Vec<String>)> {
    let profile = folder.join("profile");
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        .args(["--enable-logging=stderr", "--v=0", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{}", folder.join(page).display()))
        .output()
        .context("run the browser")?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the browser fails: {log}");
    // What else it logs is about the machine: no session bus, no graphics.
    let complaints = log.lines().filter(|line| line.contains("CONSOLE")).map(str::to_owned);
    Ok((
        String::from_utf8_lossy(&output.stdout).into_owned(),
        complaints.collect(),
    ))
}
