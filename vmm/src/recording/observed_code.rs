//! What an observer reports of the code that its vCPU executes: pages, how they change, and what processes have mapped there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use trace::format::{PAGE, space};
use x86::watch::{Code, Processor};

use super::code_map::{CodeMapping, Key};
use super::encoder::Job;
use super::guest_memory::Physical;
use super::mapped::Mapped;
use super::observer::Observer;
use super::state::{CHANGES, Content, lock};

impl Observer {
    /// Whether code that is about to be executed is as it was reported; without a length: whether its address is.
    pub(super) fn knows_code(&self, code: &Code, cpu: &mut dyn Processor) -> bool {
        if code.len == 0 {
            let known = self.code_map.addresses.get(&Self::key(code, cpu));
            return known.is_some_and(|mapping| mapping.gpa == code.physical && mapping.epoch == self.epoch);
        }
        let pool = lock(&self.shared.pool);
        pool.pages
            .get(&(code.physical & !0xfff))
            .is_some_and(|content| same(content, code, cpu))
    }

    /// Reports code that is about to be executed, where it is new. Says whether its address led elsewhere before.
    pub(super) fn tell_code(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        let gpa = code.physical & !0xfff;
        let Some((content, was)) = self.content(code, cpu) else {
            return false;
        };
        if was.is_some() {
            self.tell_page(gpa, &content, cpu);
        }
        let key = Self::key(code, cpu);
        let mapping = CodeMapping {
            gpa,
            hash: content.hash,
            epoch: self.epoch,
        };
        let before = self.code_map.insert(key, mapping);
        let elsewhere = before.is_none_or(|before| before.gpa != gpa);
        match before {
            None => {
                // Another vCPU may have executed it as it was before: then the change is reported, for its moment.
                let was = was.filter(|_| self.shared.retired.len() > 1);
                let first = was.as_ref().unwrap_or(&content);
                let page = Job::Page {
                    key,
                    content: first.clone(),
                };
                self.post(page, cpu);
                if was.is_some() {
                    self.tell_change(key, &content, cpu);
                }
            }
            Some(before) if before.hash != content.hash => self.tell_change(key, &content, cpu),
            Some(_) => {}
        }
        if elsewhere {
            self.tell_mapping(key, code.linear, cpu);
        }
        self.post(Job::Due, cpu);
        before.is_some() && elsewhere
    }

    /// A mapping that was reported before has another content.
    fn tell_change(&mut self, key: Key, content: &Arc<Content>, cpu: &mut dyn Processor) {
        let content = content.clone();
        self.post(Job::Changed { key, content }, cpu);
    }

    /// A physical page has another content: so have all addresses that lead to it.
    fn tell_page(&mut self, gpa: u64, content: &Arc<Content>, cpu: &mut dyn Processor) {
        let keys = self.code_map.of_page.get(&gpa).cloned().unwrap_or_default();
        for key in keys {
            if let Some(mapping) = self.code_map.addresses.get_mut(&key)
                && mapping.hash != content.hash
            {
                mapping.hash = content.hash;
                self.tell_change(key, content, cpu);
            }
        }
    }

    /// What changed while other vCPUs had their turns.
    pub(super) fn catch_up(&mut self, cpu: &mut dyn Processor) {
        let changed = self.shared.changed.load(Ordering::Relaxed);
        if changed == self.seen {
            return;
        }
        let shared = self.shared.clone();
        let pool = lock(&shared.pool);
        match self.seen.checked_sub(pool.dropped) {
            Some(from) => {
                // A reader that has one memory for all vCPUs, as perf has, orders what they executed by time. So this vCPU
                // tells the time behind the changes even where it has executed none of the pages.
                self.post(Job::Anchor, cpu);
                let pages: Vec<u64> = pool.changes.iter().skip(from as usize).copied().collect();
                for gpa in pages {
                    if let Some(content) = pool.pages.get(&gpa) {
                        self.tell_page(gpa, content, cpu);
                    }
                }
            }
            // Too many to be remembered.
            None => self.next_segment(cpu),
        }
        self.seen = changed;
        drop(pool);
        self.post(Job::Due, cpu);
    }

    /// Says what the process has mapped where it begins to execute a page, if that was not said yet.
    fn tell_mapping(&mut self, key: Key, linear: u64, cpu: &mut dyn Processor) {
        let context = cpu.context();
        if key.0 == 0 {
            return;
        }
        let vmcs = context.vmcs.filter(|_| context.non_root);
        let found = {
            let linux = &mut *lock(&self.shared.linux);
            let mut memory = Physical(cpu);
            let user = context.cpl == 3;
            let found = match vmcs {
                None => {
                    self.has_unknown_code |= user && linux.recording.kernel().is_none();
                    linux.recording.mapping(&mut memory, self.cpu, context.cr3, linear)
                }
                Some(vmcs) => {
                    if user && !linux.guests.knows(vmcs) {
                        self.unknown_code_of_guest.get_or_insert(linux.guests.finds());
                    }
                    linux.guests.mapping(&mut memory, vmcs, context.cr3, linear)
                }
            };
            linux.new |= found.as_ref().is_some_and(|(_, new)| *new);
            found
        };
        let Some((mapping, _)) = found else { return };
        let file = (!mapping.path.is_empty()).then(|| {
            let (number, new) = self.mapped.file(mapping.path, mapping.build_id);
            if let Some((path, build_id)) = new {
                self.post(Job::File { path, build_id }, cpu);
            }
            number
        });
        let mapped = Mapped {
            first: mapping.start >> 12,
            end: mapping.end >> 12,
            at: mapping.offset >> 12,
            file,
        };
        if !self.mapped.add((vmcs, key.0), key.1, mapped) {
            return;
        }
        let job = Job::Mapping {
            vmcs,
            space: key.0,
            page: mapped.first,
            pages: mapped.end - mapped.first,
            first: mapped.at,
            file,
        };
        self.post(job, cpu);
    }

    /// Once a kernel is found, user code that was reported before is reported anew, with what it is of.
    pub(super) fn tell_unknown_code(&mut self) {
        let own = self.has_unknown_code && self.shared.thread_switch().is_some();
        let finds = self.shared.guests_found.load(Ordering::Relaxed);
        let guests = self.unknown_code_of_guest.is_some_and(|before| before != finds);
        if !own && !guests {
            return;
        }
        self.has_unknown_code &= !own;
        if guests {
            self.unknown_code_of_guest = None;
        }
        self.code_map.forget_user_code();
        self.code += 1;
    }

    fn key(code: &Code, cpu: &dyn Processor) -> Key {
        (space(cpu.context().cr3, code.linear), code.linear >> 12)
    }

    /// The content of a page as executed now, and what it was, where others have to hear that it is new.
    fn content(&mut self, code: &Code, cpu: &mut dyn Processor) -> Option<(Arc<Content>, Option<Arc<Content>>)> {
        let gpa = code.physical & !0xfff;
        let shared = self.shared.clone();
        let mut pool = lock(&shared.pool);
        if let Some(content) = pool.pages.get(&gpa)
            && same(content, code, cpu)
        {
            return Some((content.clone(), None));
        }
        let mut bytes = [0; PAGE];
        cpu.read_phys(gpa, &mut bytes).ok()?;
        let hash = shared.hashing.of(&bytes);
        let content = Arc::new(Content { bytes, hash });
        let before = pool.pages.insert(gpa, content.clone());
        if before.is_some() {
            pool.changes.push_back(gpa);
            if pool.changes.len() > CHANGES {
                pool.changes.pop_front();
                pool.dropped += 1;
            }
            let changed = pool.dropped + pool.changes.len() as u64;
            shared.changed.store(changed, Ordering::Relaxed);
            // This vCPU knows the others: it was notified of them before it got its turn.
            self.seen = changed;
        }
        Some((content, before))
    }
}

/// Whether the bytes of the code are those of the content.
fn same(content: &Content, code: &Code, cpu: &mut dyn Processor) -> bool {
    let from = (code.physical & 0xfff) as usize;
    let mut at = 0;
    let mut part = [0; 256];
    while at < code.len as usize {
        let len = (code.len as usize - at).min(part.len());
        let Some(known) = content.bytes.get(from + at..from + at + len) else {
            return false;
        };
        let here = code.physical + at as u64;
        if cpu.read_phys(here, &mut part[..len]).is_err() || known != &part[..len] {
            return false;
        }
        at += len;
    }
    true
}
