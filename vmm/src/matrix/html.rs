//! A report as one HTML file without anything from outside: a table for each engine, which scrolls sideways on a narrow screen under
//! the guests' names, and below it each cell's tests. It is well-formed XML as well, so that any parser can check it.

use std::fmt::Write;

use quick_xml::escape::escape;

use super::{
    Report,
    cell::{Cell, Verdict},
    tap::Point,
    text,
};

const STYLE: &str = "
:root { color-scheme: light dark; --line: #8884; --pass: #1a7f37; --fail: #cf222e; --skip: #6e7781; --back: #fff; }
@media (prefers-color-scheme: dark) { :root { --pass: #3fb950; --fail: #f85149; --skip: #8b949e; --back: #0d1117; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 75rem; background: var(--back); }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; min-width: 100%; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: center; white-space: nowrap; }
tr:last-child > * { border-bottom: 0; }
tr > :first-child { position: sticky; left: 0; background: var(--back); text-align: left; font-weight: 600; border-right: 1px solid var(--line); }
td a { display: block; margin: -.35rem -.6rem; padding: .35rem .6rem; text-decoration: none; }
.pass { color: var(--pass); } .fail { color: var(--fail); font-weight: 700; } .skip { color: var(--skip); }
details { border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0; scroll-margin-top: 1rem; }
summary { padding: .5rem .7rem; cursor: pointer; overflow-wrap: anywhere; }
details > :not(summary) { margin: .2rem .9rem .7rem; overflow-wrap: anywhere; }
details ul { padding-left: 1rem; } details:target { outline: 2px solid var(--skip); }
pre { overflow-x: auto; font-size: .8rem; background: #8881; padding: .5rem; border-radius: 4px; }
";

/// A report as HTML. `differences` are lines of the expected table that are otherwise, if there is one.
pub fn write(report: &Report, differences: &[String]) -> String {
    let mut text = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>minivmm matrix</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>minivmm matrix</h1>\n<p>{}</p>\n",
        escape(&*text::summary(report))
    );
    if !differences.is_empty() {
        let lines = differences.join("\n");
        let _ = writeln!(
            text,
            "<h2 class=\"fail\">Not as expected</h2>\n<pre>{}</pre>",
            escape(&*lines)
        );
    }
    for engine in report.engines() {
        if report.absent(engine) {
            let _ = writeln!(
                text,
                "<h2>Engine {}</h2>\n<p>Not to be had here: see below.</p>",
                escape(engine)
            );
        } else {
            table(&mut text, report, engine);
        }
    }
    let failed: Vec<(usize, &Cell)> = numbered(report).filter(|(_, cell)| class(cell) == "fail").collect();
    for (title, cells) in [
        ("Failed", failed),
        (
            "The others",
            numbered(report).filter(|(_, cell)| class(cell) != "fail").collect(),
        ),
    ] {
        if cells.is_empty() {
            continue;
        }
        let _ = writeln!(text, "<h2>{title}</h2>");
        for (number, cell) in cells {
            details(&mut text, number, cell);
        }
    }
    text += "</body>\n</html>\n";
    text
}

fn numbered(report: &Report) -> impl Iterator<Item = (usize, &Cell)> {
    report.cells.iter().enumerate()
}

fn class(cell: &Cell) -> &'static str {
    match cell.verdict {
        Verdict::Passed => "pass",
        Verdict::Failed(_) => "fail",
        Verdict::Skipped(_) | Verdict::Absent(_) => "skip",
    }
}

fn table(text: &mut String, report: &Report, engine: &str) {
    let models = report.models();
    let _ = write!(
        text,
        "<h2>Engine {}</h2>\n<div class=\"wide\"><table>\n<tr><th>guest</th>",
        escape(engine)
    );
    for model in &models {
        let _ = write!(text, "<th>{}</th>", escape(*model));
    }
    text.push_str("</tr>\n");
    for guest in report.guests() {
        let _ = write!(text, "<tr><th scope=\"row\">{}</th>", escape(guest));
        for model in &models {
            let here = |cell: &Cell| cell.guest == guest && cell.model == *model && cell.engine == engine;
            match numbered(report).find(|(_, cell)| here(cell)) {
                None => text.push_str("<td></td>"),
                Some((number, cell)) => {
                    let [passed, failed, _] = cell.counts();
                    let says = match &cell.verdict {
                        Verdict::Passed if cell.points.is_empty() => "ok".to_string(),
                        Verdict::Passed => passed.to_string(),
                        Verdict::Failed(_) if failed > 0 => format!("{failed} failed"),
                        Verdict::Failed(_) => "failed".to_string(),
                        Verdict::Skipped(_) | Verdict::Absent(_) => "skip".to_string(),
                    };
                    let class = class(cell);
                    let _ = write!(text, "<td><a class=\"{class}\" href=\"#c{number}\">{says}</a></td>");
                }
            }
        }
        text.push_str("</tr>\n");
    }
    text.push_str("</table></div>\n");
}

fn details(text: &mut String, number: usize, cell: &Cell) {
    let class = class(cell);
    let open = if class == "fail" { " open=\"open\"" } else { "" };
    let [passed, failed, skipped] = cell.counts();
    let says = match &cell.verdict {
        Verdict::Passed => "passed".to_string(),
        Verdict::Failed(why) => why.clone(),
        Verdict::Skipped(reason) | Verdict::Absent(reason) => format!("skipped: {reason}"),
    };
    let _ = writeln!(
        text,
        "<details id=\"c{number}\"{open}><summary><b>{}</b> <span class=\"{class}\">{}</span></summary>",
        escape(&*cell.name()),
        escape(&*says)
    );
    let seconds = cell.time.as_secs_f64();
    if cell.points.is_empty() {
        let _ = writeln!(text, "<p>{seconds:.2} s</p>");
    } else {
        let _ = writeln!(
            text,
            "<p>{passed} passed, {failed} failed, {skipped} skipped; {seconds:.2} s</p>\n<ul>"
        );
        // What failed comes first.
        let failed = |point: &Point| matches!(point, Point::Failed(_));
        let (first, rest): (Vec<_>, Vec<_>) = cell.points.iter().partition(|(_, point)| failed(point));
        for (name, point) in first.into_iter().chain(rest) {
            let name = escape(name.as_str());
            let _ = match point {
                Point::Passed => writeln!(text, "<li><span class=\"pass\">ok</span> {name}</li>"),
                Point::Skipped(reason) => {
                    let reason = escape(reason.as_str());
                    writeln!(text, "<li><span class=\"skip\">skip</span> {name}: {reason}</li>")
                }
                Point::Failed(diagnostic) => {
                    let diagnostic = escape(diagnostic.as_str());
                    writeln!(
                        text,
                        "<li><span class=\"fail\">failed</span> {name}<pre>{diagnostic}</pre></li>"
                    )
                }
            };
        }
        text.push_str("</ul>\n");
    }
    if !cell.log.is_empty() {
        // What a guest writes may be no character of XML.
        let log = cell
            .log
            .replace(|c: char| c.is_control() && c != '\n' && c != '\t', "\u{fffd}");
        let _ = writeln!(text, "<pre>{}</pre>", escape(&*log));
    }
    text.push_str("</details>\n");
}

#[cfg(test)]
#[path = "html_test.rs"]
mod tests;
