//! Lane `browser`: pages in a real Chromium.

mod html_report;
mod live_page;
