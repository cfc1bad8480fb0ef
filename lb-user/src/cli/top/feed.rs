//! The thread that asks the agent again and again, whatever it answers.

use std::{
    io,
    path::Path,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, SystemTime},
};

use crate::{
    control,
    view::{Answer, Query, ReportView, ServiceFilter, Timestamp},
};

/// What came of one question.
#[derive(Debug)]
pub(super) struct Fed {
    /// When it came.
    pub(super) time: Timestamp,
    /// The report, or why there is none.
    pub(super) result: Result<Box<ReportView>, String>,
}

/// The receiving end; the thread ends after it is dropped.
#[derive(Debug)]
pub(super) struct Feed {
    answers: Receiver<Fed>,
    /// Dropping it wakes the thread from its pause, and ends it.
    _alive: Sender<()>,
}

impl Feed {
    /// Starts to ask, once at once and then after each interval.
    pub(super) fn start(socket: &Path, interval: Duration) -> io::Result<Self> {
        let (alive, ended) = mpsc::channel();
        let (sender, answers) = mpsc::channel();
        let socket = socket.to_owned();
        thread::Builder::new()
            .name("top-feed".to_owned())
            .spawn(move || ask_on(&socket, interval, &sender, &ended))?;
        Ok(Self { answers, _alive: alive })
    }

    /// What came since the last look.
    pub(super) fn answers(&self) -> impl Iterator<Item = Fed> {
        self.answers.try_iter()
    }
}

fn ask_on(socket: &Path, interval: Duration, sender: &Sender<Fed>, ended: &Receiver<()>) {
    let query = Query::Report {
        filter: ServiceFilter::default(),
    };
    loop {
        let result = match control::ask(socket, &query) {
            Ok(Answer::Report(report)) => Ok(report),
            Ok(_) => Err("the answer is no report".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let time = Timestamp::from_system(SystemTime::now());
        if sender.send(Fed { time, result }).is_err() {
            return;
        }
        match ended.recv_timeout(interval) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
