//! Which processes of a Linux are recorded: `--trace-filter comm=NAME` and `pid=N`.

use trace::linux::Task;

use super::filter::Filter;

/// Processes by name and by number: any of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WantedProcesses {
    names: Vec<String>,
    numbers: Vec<u32>,
}

impl WantedProcesses {
    /// Those of the filters; `None`: no filter chooses processes.
    pub fn of(filters: &[Filter]) -> Option<WantedProcesses> {
        let (mut names, mut numbers) = (Vec::new(), Vec::new());
        for filter in filters {
            match filter {
                Filter::Comm(name) => names.push(name.clone()),
                Filter::Pid(number) => numbers.push(*number),
                Filter::Kernel | Filter::User | Filter::Cr3(_) | Filter::Ip(..) => {}
            }
        }
        (!names.is_empty() || !numbers.is_empty()).then_some(WantedProcesses { names, numbers })
    }

    /// A thread is of one of them, or has such a name itself.
    pub fn has(&self, thread: &Task) -> bool {
        self.numbers.contains(&thread.tgid) || self.names.contains(&thread.comm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // covers: trace/filter-process
    #[test]
    fn threads_are_chosen_by_their_names_and_by_the_number_of_their_process() {
        assert_eq!(WantedProcesses::of(&[Filter::Kernel, Filter::Cr3(0)]), None);
        let filters = [
            Filter::Comm("sh".into()),
            Filter::User,
            Filter::Pid(7),
            Filter::Comm("ps".into()),
        ];
        let wanted = WantedProcesses::of(&filters).unwrap();
        for (pid, tgid, comm, has) in [
            (1, 1, "init", false),
            (2, 2, "sh", true),
            (2, 2, "sh2", false),
            (9, 9, "ps", true),
            (7, 7, "any", true),
            (8, 7, "any", true),
            (7, 8, "any", false),
        ] {
            let task = Task {
                pid,
                tgid,
                comm: comm.into(),
                page_table: None,
            };
            assert_eq!(wanted.has(&task), has, "{task:?}");
        }
    }
}
