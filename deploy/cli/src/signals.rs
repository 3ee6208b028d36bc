//! When a server, or what a container may run as its first process, is to stop: Ctrl-C, SIGTERM, or the end of standard
//! input. Without a handler the first process of a container would not see SIGTERM at all.

use std::io::Read;

use tokio_util::sync::CancellationToken;

/// A token that fires at the first Ctrl-C or SIGTERM and, if asked for, when standard input closes; the latter ties a
/// child to its parent however that ends. A second signal ends the process at once.
///
/// # Errors
/// If signal handlers cannot be installed.
pub fn shutdown_token(exit_on_stdin_close: bool) -> std::io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut signals = Signals::new()?;
    tokio::spawn({
        let token = token.clone();
        async move {
            signals.next().await;
            tracing::info!("stopping; a second signal ends the process at once");
            token.cancel();
            signals.next().await;
            std::process::exit(1);
        }
    });
    if exit_on_stdin_close {
        let token = token.clone();
        // Not a task: a blocking read would keep the runtime from ending.
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            while std::io::stdin().read(&mut buffer).is_ok_and(|count| count > 0) {}
            token.cancel();
            tracing::info!("standard input closed, stopping");
        });
    }
    Ok(token)
}

/// Ctrl-C and, where there is one, SIGTERM.
struct Signals {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    #[cfg(unix)]
    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    #[cfg(not(unix))]
    fn new() -> std::io::Result<Self> {
        Ok(Self {})
    }

    #[cfg(not(unix))]
    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
