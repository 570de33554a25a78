//! What a guest test reports: TAP 14 on its serial port.

/// How one test point came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Point {
    /// `ok`.
    Passed,
    /// `ok ... # SKIP`, with the reason.
    Skipped(String),
    /// `not ok`, with the diagnostic below it.
    Failed(String),
}

/// A whole report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Each test by name.
    pub points: Vec<(String, Point)>,
    /// The reason, where the plan was to run nothing.
    pub nothing: Option<String>,
}

impl Report {
    /// Reads a console's text.
    ///
    /// # Errors
    /// What is not as TAP 14 has it: no version, no plan, numbers out of order, fewer points than planned.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut lines = text
            .lines()
            .skip_while(|line| *line != "TAP version 14")
            .skip(1)
            .peekable();
        let plan = lines.next().ok_or("no line \"TAP version 14\" with a plan after it")?;
        let (range, reason) = match plan.split_once(" # SKIP ") {
            Some((range, reason)) => (range, Some(reason.to_string())),
            None => (plan, None),
        };
        let planned: usize = range
            .strip_prefix("1..")
            .and_then(|count| count.parse().ok())
            .ok_or_else(|| format!("not a plan: {plan}"))?;
        let mut points: Vec<(String, Point)> = Vec::new();
        while let Some(line) = lines.next() {
            let (passed, rest) = match (line.strip_prefix("ok "), line.strip_prefix("not ok ")) {
                (Some(rest), _) => (true, rest),
                (_, Some(rest)) => (false, rest),
                _ if line.starts_with("Bail out!") => return Err(line.to_string()),
                // Other text of the guest.
                _ => continue,
            };
            let (number, rest) = rest.split_once(" - ").ok_or_else(|| format!("no name: {line}"))?;
            if number.parse() != Ok(points.len() + 1) {
                return Err(format!("number {number} is not {}: {line}", points.len() + 1));
            }
            let (name, point) = match (passed, rest.split_once(" # SKIP ")) {
                (true, Some((name, reason))) => (name, Point::Skipped(reason.to_string())),
                (true, None) => (rest, Point::Passed),
                (false, _) => {
                    let mut diagnostic = String::new();
                    while let Some(line) = lines.next_if(|line| line.starts_with("  ")) {
                        diagnostic.push_str(line);
                        diagnostic.push('\n');
                    }
                    (rest, Point::Failed(diagnostic))
                }
            };
            points.push((name.to_string(), point));
        }
        if points.len() != planned {
            return Err(format!("{} tests of {planned} reported", points.len()));
        }
        Ok(Self {
            points,
            nothing: reason,
        })
    }

    /// The names of tests that failed.
    pub fn failed(&self) -> Vec<&str> {
        let failed = self
            .points
            .iter()
            .filter(|(_, point)| matches!(point, Point::Failed(_)));
        failed.map(|(name, _)| name.as_str()).collect()
    }

    /// How a test came out.
    pub fn point(&self, name: &str) -> Option<&Point> {
        self.points
            .iter()
            .find(|(other, _)| other == name)
            .map(|(_, point)| point)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read() {
        let text = "SeaBIOS\nTAP version 14\n1..3\nok 1 - a\nnoise\nok 2 - b # SKIP no x (y)\nnot ok 3 - c\n  ---\n  at: d:1\n  ...\n";
        let report = Report::read(text).unwrap();
        assert_eq!(report.nothing, None);
        assert_eq!(report.failed(), ["c"]);
        assert_eq!(report.point("a"), Some(&Point::Passed));
        assert_eq!(report.point("b"), Some(&Point::Skipped("no x (y)".to_string())));
        assert_eq!(
            report.point("c"),
            Some(&Point::Failed("  ---\n  at: d:1\n  ...\n".to_string()))
        );
        let none = Report::read("TAP version 14\n1..0 # SKIP no 64-bit mode\n").unwrap();
        assert_eq!(
            (none.points.len(), none.nothing.as_deref()),
            (0, Some("no 64-bit mode"))
        );
    }

    #[test]
    fn what_is_no_report_is_said() {
        for (text, word) in [
            ("", "TAP version 14"),
            ("TAP version 14\nok 1 - a\n", "not a plan"),
            ("TAP version 14\n1..2\nok 1 - a\n", "1 tests of 2"),
            ("TAP version 14\n1..1\nok 2 - a\n", "number 2 is not 1"),
            ("TAP version 14\n1..1\nok 1\n", "no name"),
            ("TAP version 14\n1..1\nBail out! no\n", "Bail out"),
        ] {
            let error = Report::read(text).unwrap_err();
            assert!(error.contains(word), "{text:?}: {error}");
        }
    }
}
